# Decides whether the CUDA sources are built: sets KVSPAN_WITH_CUDA and enables the language.
#
# KVSPAN_CUDA=AUTO  use nvcc if it is found and can compile for the architectures asked for
# KVSPAN_CUDA=ON    the same, but an error if not
# KVSPAN_CUDA=OFF   never
#
# nvcc is probed with a real compilation and not only looked up, because an nvcc that rejects the
# host compiler, or lacks an architecture, must not break a build that did not ask for CUDA.

set(KVSPAN_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE KVSPAN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KVSPAN_WITH_CUDA OFF)

string(TOUPPER "${KVSPAN_CUDA}" _kvspan_cuda_mode)
if(NOT _kvspan_cuda_mode MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVSPAN_CUDA is '${KVSPAN_CUDA}'; expected AUTO, ON or OFF")
endif()

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90 100)
endif()

# Sets OUT_NVCC to the compiler's path and OUT_WHY to the reason when it cannot be used.
function(_kvspan_probe_nvcc OUT_NVCC OUT_WHY)
  set(${OUT_NVCC} "" PARENT_SCOPE)
  set(_hints $ENV{CUDACXX} ${CMAKE_CUDA_COMPILER})
  set(_nvcc "")
  foreach(_hint IN LISTS _hints)
    if(EXISTS "${_hint}")
      set(_nvcc "${_hint}")
      break()
    endif()
  endforeach()
  if(NOT _nvcc)
    find_program(KVSPAN_NVCC nvcc PATHS "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
    mark_as_advanced(KVSPAN_NVCC)
    set(_nvcc "${KVSPAN_NVCC}")
  endif()
  if(NOT _nvcc)
    set(${OUT_WHY} "nvcc not found (PATH, CUDACXX, CUDA_PATH, /usr/local/cuda)" PARENT_SCOPE)
    return()
  endif()

  set(_dir "${CMAKE_BINARY_DIR}/CMakeFiles/kvspan-nvcc-probe")
  file(MAKE_DIRECTORY "${_dir}")
  file(WRITE "${_dir}/probe.cu" "#include <cuda_runtime.h>\n__global__ void probe() {}\n")
  set(_gencode "")
  foreach(_arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
    string(REGEX REPLACE "-(real|virtual)$" "" _arch "${_arch}")
    if(_arch MATCHES "^[0-9]+[a-z]?$")
      list(APPEND _gencode "-gencode=arch=compute_${_arch},code=sm_${_arch}")
    endif()
  endforeach()
  set(_host "")
  if(CMAKE_CUDA_HOST_COMPILER)
    set(_host "-ccbin=${CMAKE_CUDA_HOST_COMPILER}")
  endif()
  execute_process(
    COMMAND "${_nvcc}" -std=c++20 ${_host} ${_gencode} -c probe.cu -o probe.o
    WORKING_DIRECTORY "${_dir}"
    RESULT_VARIABLE _result OUTPUT_VARIABLE _output ERROR_VARIABLE _output)
  if(NOT _result EQUAL 0)
    string(STRIP "${_output}" _output)
    string(REGEX REPLACE "\n.*" "" _first "${_output}")
    set(${OUT_WHY}
      "${_nvcc} cannot compile for sm ${CMAKE_CUDA_ARCHITECTURES}: ${_first}" PARENT_SCOPE)
    return()
  endif()
  set(${OUT_NVCC} "${_nvcc}" PARENT_SCOPE)
endfunction()

if(NOT _kvspan_cuda_mode STREQUAL "OFF")
  set(_kvspan_why "")
  _kvspan_probe_nvcc(_kvspan_nvcc _kvspan_why)
  if(_kvspan_nvcc)
    set(CMAKE_CUDA_COMPILER "${_kvspan_nvcc}")
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake 3.25 does not know yet that nvcc has C++20; the probe has just shown it.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(KVSPAN_WITH_CUDA ON)
  elseif(_kvspan_cuda_mode STREQUAL "ON")
    message(FATAL_ERROR "KVSPAN_CUDA=ON, but ${_kvspan_why}")
  endif()
endif()

if(KVSPAN_WITH_CUDA)
  message(STATUS "kvspan: CUDA on (sm ${CMAKE_CUDA_ARCHITECTURES})")
elseif(_kvspan_cuda_mode STREQUAL "OFF")
  message(STATUS "kvspan: CUDA off (KVSPAN_CUDA=OFF)")
else()
  message(STATUS "kvspan: CUDA off (${_kvspan_why})")
endif()
