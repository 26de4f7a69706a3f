# Installs the build folder BUILD, builds the project EXAMPLE with what was installed, and runs it.
#
#   cmake -DBUILD=... -DEXAMPLE=... -DGENERATOR=... -DCXX=... -DCONFIG=... -P check_package.cmake
set(_root "${BUILD}/package-test")
file(REMOVE_RECURSE "${_root}")

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE _result OUTPUT_VARIABLE _output
    ERROR_VARIABLE _output)
  if(NOT _result EQUAL 0)
    message(FATAL_ERROR "${ARGN}: ${_result}\n${_output}")
  endif()
  set(OUTPUT "${_output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${_root}/installed" --config "${CONFIG}")
run(${CMAKE_COMMAND} -S "${EXAMPLE}" -B "${_root}/example" -G "${GENERATOR}"
  "-DCMAKE_PREFIX_PATH=${_root}/installed" "-DCMAKE_CXX_COMPILER=${CXX}"
  "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_RUNTIME_OUTPUT_DIRECTORY=${_root}/bin")
run(${CMAKE_COMMAND} --build "${_root}/example" --config "${CONFIG}")
run("${_root}/bin/move_spans")
message("${OUTPUT}")
if(NOT OUTPUT MATCHES "8 moves: 4 cycles, 12 steps" OR NOT OUTPUT MATCHES "positions: [0-9.]+e-0[789]")
  message(FATAL_ERROR "expected 4 cycles and a difference below 1e-6")
endif()
