# The C++ core alone: headers, archive and the CMake package `kvtransfer`.
include(CMakePackageConfigHelpers)
install(TARGETS kvtransfer EXPORT kvtransferTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/kvtransfer DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT kvtransferTargets NAMESPACE kvtransfer:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvtransfer)
configure_package_config_file(cmake/kvtransferConfig.cmake.in kvtransferConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvtransfer)
write_basic_package_version_file(kvtransferConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvtransferConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/kvtransferConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvtransfer)
