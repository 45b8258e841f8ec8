# liburing, linked statically so that a wheel needs nothing from the system at run time.
find_path(LIBURING_INCLUDE_DIR liburing.h REQUIRED)
find_library(LIBURING_STATIC NAMES liburing.a REQUIRED)
add_library(liburing_static STATIC IMPORTED)
set_target_properties(liburing_static PROPERTIES
  IMPORTED_LOCATION ${LIBURING_STATIC} INTERFACE_INCLUDE_DIRECTORIES ${LIBURING_INCLUDE_DIR})
