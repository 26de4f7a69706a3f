# Fails if an object file compiled for a wider instruction set exports anything but its one entry
# point. A weak symbol (an inline function or template instance) could be chosen by the linker for
# the whole program, which would then crash on a machine without that instruction set.
foreach(_object IN LISTS OBJECTS)
  if(NOT _object MATCHES "(rerope|gated_delta)_cpu_(avx2|avx512)")
    continue()
  endif()
  execute_process(COMMAND "${NM}" --extern-only --defined-only "${_object}"
    OUTPUT_VARIABLE _symbols RESULT_VARIABLE _result)
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "${NM} failed on ${_object}")
  endif()
  string(REGEX MATCHALL "[^\n]+" _lines "${_symbols}")
  foreach(_line IN LISTS _lines)
    if(NOT _line MATCHES " T [^ ]*(rotate|gated_delta)_kernels_avx(2|512)")
      message(SEND_ERROR "${_object} exports: ${_line}")
    endif()
  endforeach()
endforeach()
