# kvspan_core: the static C++ library. It links neither Python nor libtorch.
add_library(kvspan_core STATIC
  cpp/src/bin_packing.cpp
  cpp/src/block_copy_cpu.cpp
  cpp/src/block_hash.cpp
  cpp/src/block_moves.cpp
  cpp/src/causal_conv1d.cpp
  cpp/src/causal_conv1d_cpu.cpp
  cpp/src/check.cpp
  cpp/src/copier_cpu.cpp
  cpp/src/copy_pieces.cpp
  cpp/src/copy_queue.cpp
  cpp/src/dispatch.cpp
  cpp/src/gated_delta.cpp
  cpp/src/gated_delta_cpu.cpp
  cpp/src/gated_delta_cpu_avx2.cpp
  cpp/src/gated_delta_cpu_avx512.cpp
  cpp/src/gated_delta_cpu_baseline.cpp
  cpp/src/graph.cpp
  cpp/src/large_vector.cpp
  cpp/src/move_schedule.cpp
  cpp/src/rerope_cpu.cpp
  cpp/src/rerope_cpu_avx2.cpp
  cpp/src/rerope_cpu_avx512.cpp
  cpp/src/rerope_cpu_avx512_vbmi.cpp
  cpp/src/rerope_cpu_baseline.cpp
  cpp/src/sha256.cpp
  cpp/src/sha256_arm.cpp
  cpp/src/sha256_x86.cpp
  cpp/src/tensor_view.cpp
  cpp/src/token_store.cpp
  cpp/src/vector_isa.cpp
  cpp/src/xxh3.cpp)
add_library(kvspan::core ALIAS kvspan_core)
target_include_directories(kvspan_core
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/cpp/include> $<INSTALL_INTERFACE:include>
  PRIVATE cpp/src)
target_compile_features(kvspan_core PUBLIC cxx_std_20)
find_package(Threads REQUIRED)  # of the copy queue
target_link_libraries(kvspan_core PRIVATE $<BUILD_INTERFACE:kvspan_warnings> Threads::Threads)

# Results are the same bits on every instruction set, so products and sums stay separate.
target_compile_options(kvspan_core PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# Only these five files leave the baseline instruction set; the code to run is chosen at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(cpp/src/rerope_cpu_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mf16c;-mfma")
  set_source_files_properties(cpp/src/rerope_cpu_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512")
  set_source_files_properties(cpp/src/rerope_cpu_avx512_vbmi.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vbmi;-mprefer-vector-width=512")
  set_source_files_properties(cpp/src/gated_delta_cpu_avx2.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx2;-mf16c;-mfma")
  set_source_files_properties(cpp/src/gated_delta_cpu_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mprefer-vector-width=512")
endif()

if(KVSPAN_OPENMP)
  find_package(OpenMP COMPONENTS CXX)
endif()
if(OpenMP_CXX_FOUND)
  message(STATUS "kvspan: OpenMP on (CPU kernels use several threads)")
  target_link_libraries(kvspan_core PRIVATE OpenMP::OpenMP_CXX)
else()
  message(STATUS "kvspan: OpenMP off (CPU kernels use one thread)")
endif()

if(KVSPAN_WITH_XXHASH)
  set_source_files_properties(cpp/src/xxh3.cpp PROPERTIES
    COMPILE_DEFINITIONS KVSPAN_WITH_XXHASH
    INCLUDE_DIRECTORIES "${KVSPAN_XXHASH_INCLUDE_DIR}")
endif()

if(KVSPAN_WITH_CUDA)
  target_sources(kvspan_core PRIVATE cuda/block_copy.cu cuda/copy_queue.cu cuda/device.cu cuda/gated_delta.cu
    cuda/rerope.cu)
  # Static, so that the library loads (and says why not) where there is no CUDA installation.
  set_target_properties(kvspan_core PROPERTIES CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(kvspan_core PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${KVSPAN_WERROR}>>:-Xptxas=--warn-on-spills,--warning-as-error>)
else()
  target_sources(kvspan_core PRIVATE cpp/src/no_cuda.cpp)
endif()
