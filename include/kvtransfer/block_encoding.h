// BlockEncoding: how the KV of a Full Block lies in its file: as it is, or 16-bit elements as FP8.
//
// FP8 halves what storage and its NIC carry and costs accuracy; memory, network and device keep the
// 16-bit form. A group of `group` adjacent elements becomes one byte s and a byte of e4m3 (OCP
// "FP8" FN: 4 exponent bits, 3 of mantissa, largest 448) per element: x = e4m3 * 2^(s - 128). With
// group = the head's dimension that is a scale per token and head.
//
// Error of a finite element: at most 1/16 of itself, or 2^-17 of the group's largest, or the
// element type's smallest subnormal, whichever is most. Signs and NaN stay; an infinity becomes
// NaN.
#pragma once

#include <cstdint>
#include <string>

#include "kvtransfer/block_layout.h"

namespace kvtransfer {

struct BlockEncoding {
  enum class Kind : uint8_t { kRaw, kFp8OfBfloat16, kFp8OfFloat16 };
  static constexpr uint32_t kMaxGroup = 1024;

  Kind kind = Kind::kRaw;
  uint32_t group = 0;  // elements per scale: a multiple of 8; 0 with kRaw

  bool raw() const noexcept { return kind == Kind::kRaw; }
  // Bytes in the file for `bytes` of KV, a whole number of groups.
  uint64_t stored_bytes(uint64_t bytes) const noexcept {
    return raw() ? bytes : bytes / (2 * group) * (group + 1);
  }
  // What a header and a manifest say of it.
  uint32_t code() const noexcept { return static_cast<uint32_t>(kind) | group << 8; }
  std::string to_string() const;

  // Throws Error(kInvalidArgument) if `layout` can't be stored so: a group must not cross the end
  // of a plane's token.
  void check(const BlockLayout& layout) const;

  // `bytes` of KV at `from` -> stored_bytes(bytes) at `to`. REQUIRES: !raw(), no overlap.
  void encode(const uint8_t* from, uint64_t bytes, uint8_t* to) const noexcept;
  // The inverse. `from` may lie in the tail of the same buffer, ending where `to + bytes` ends or
  // later.
  void decode(const uint8_t* from, uint64_t bytes, uint8_t* to) const noexcept;

  friend bool operator==(const BlockEncoding&, const BlockEncoding&) = default;
};

}  // namespace kvtransfer
