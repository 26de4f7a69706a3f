# Decides whether TokenStore gets XXH3-128: sets KVSPAN_WITH_XXHASH and KVSPAN_XXHASH_INCLUDE_DIR.
#
# KVSPAN_XXHASH=AUTO  use xxHash's header if it is found, in version 0.8 (the first with XXH3-128) or later
# KVSPAN_XXHASH=ON    the same, but an error if not
# KVSPAN_XXHASH=OFF   never
#
# A system header and not a copy here or a download: it is a mode that few will want, and a build
# without it says so when it is asked for.
include(CheckCXXSourceCompiles)

set(KVSPAN_XXHASH AUTO CACHE STRING "Build the xxh3-128 mode of block keys: AUTO, ON or OFF")
set_property(CACHE KVSPAN_XXHASH PROPERTY STRINGS AUTO ON OFF)
set(KVSPAN_WITH_XXHASH OFF)

string(TOUPPER "${KVSPAN_XXHASH}" _kvspan_xxhash_mode)
if(NOT _kvspan_xxhash_mode MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVSPAN_XXHASH is '${KVSPAN_XXHASH}'; expected AUTO, ON or OFF")
endif()

if(NOT _kvspan_xxhash_mode STREQUAL "OFF")
  find_path(KVSPAN_XXHASH_INCLUDE_DIR xxhash.h)
  mark_as_advanced(KVSPAN_XXHASH_INCLUDE_DIR)
  if(KVSPAN_XXHASH_INCLUDE_DIR)
    set(CMAKE_REQUIRED_INCLUDES "${KVSPAN_XXHASH_INCLUDE_DIR}")
    check_cxx_source_compiles("
      #define XXH_INLINE_ALL
      #include <xxhash.h>
      int main() { return (int)XXH3_128bits_withSeed(\"\", 0, 1).low64; }" KVSPAN_XXHASH_COMPILES)
    unset(CMAKE_REQUIRED_INCLUDES)
  endif()
  if(KVSPAN_XXHASH_COMPILES)
    set(KVSPAN_WITH_XXHASH ON)
  elseif(_kvspan_xxhash_mode STREQUAL "ON")
    message(FATAL_ERROR
      "KVSPAN_XXHASH=ON needs xxhash.h 0.8 or later: apt-get install libxxhash-dev")
  endif()
endif()

if(KVSPAN_WITH_XXHASH)
  message(STATUS "kvspan: xxh3-128 mode of block keys on")
else()
  message(STATUS "kvspan: xxh3-128 mode of block keys off (libxxhash-dev and KVSPAN_XXHASH=ON)")
endif()
