# cmake --install: the static library, its headers, and a package for find_package(kvspan).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_kvspan_package "${CMAKE_INSTALL_LIBDIR}/cmake/kvspan")
set_target_properties(kvspan_core PROPERTIES EXPORT_NAME core)
install(TARGETS kvspan_core EXPORT kvspanTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY cpp/include/kvspan DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kvspanTargets NAMESPACE kvspan:: DESTINATION ${_kvspan_package})
configure_package_config_file(cmake/kvspanConfig.cmake.in kvspanConfig.cmake
  INSTALL_DESTINATION ${_kvspan_package} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(kvspanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvspanConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/kvspanConfigVersion.cmake" DESTINATION ${_kvspan_package})
