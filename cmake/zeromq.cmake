# ZeroMQ::ZeroMQ. Its pkg-config file passes on the include folders of libraries that only libzmq itself uses, and
# CMake orders them differently on the second configure than on the first, which would compile everything again.
find_path(WEFT_ZMQ_INCLUDE zmq.h REQUIRED)
find_library(WEFT_ZMQ_LIBRARY zmq REQUIRED)
mark_as_advanced(WEFT_ZMQ_INCLUDE WEFT_ZMQ_LIBRARY)
add_library(ZeroMQ::ZeroMQ UNKNOWN IMPORTED)
set_target_properties(ZeroMQ::ZeroMQ PROPERTIES
  IMPORTED_LOCATION "${WEFT_ZMQ_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${WEFT_ZMQ_INCLUDE}")
