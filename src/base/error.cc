#include "kvtransfer/error.h"

#include <array>
#include <cstring>

namespace kvtransfer {

std::string_view error_code_name(ErrorCode code) noexcept {
  static constexpr std::array<std::string_view, 12> kNames = {
      "none",     "invalid_argument", "io",        "no_space",  "corrupt",     "not_found",
      "mismatch", "timeout",          "peer_lost", "exhausted", "unsupported", "cancelled"};
  const auto index = static_cast<size_t>(code);
  return index < kNames.size() ? kNames[index] : std::string_view("unknown");
}

namespace {
std::string with_errno(const std::string& what, int sys_errno) {
  return sys_errno == 0 ? what : what + ": " + std::strerror(sys_errno);
}
}  // namespace

Error::Error(ErrorCode code, const std::string& what, int sys_errno)
    : std::runtime_error(with_errno(what, sys_errno)), code_(code), sys_errno_(sys_errno) {}

}  // namespace kvtransfer
