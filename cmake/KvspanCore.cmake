# kvspan_core: the static C++ library. It links neither Python nor libtorch.
add_library(kvspan_core STATIC
  cpp/src/check.cpp)
target_include_directories(kvspan_core PUBLIC cpp/include PRIVATE cpp/src)
target_link_libraries(kvspan_core PRIVATE kvspan_warnings)
