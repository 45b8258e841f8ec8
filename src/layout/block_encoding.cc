#include "kvtransfer/block_encoding.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

constexpr float kLargestCode = 448.0F;
constexpr int kBias = 128;
constexpr uint8_t kNan = 0x7f;

float power_of_two(int exponent) noexcept {  // -126..127
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

struct Bfloat16 {
  static constexpr float kLargest = 0x1.fep127F;
  static float to_float(uint16_t x) noexcept {
    return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
  }
  // REQUIRES: `x` has at most 8 significant bits (an e4m3 times a power of two has 4).
  static uint16_t from_float(float x) noexcept {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  }
};

struct Float16 {
  static constexpr float kLargest = 65504.0F;
  static float to_float(uint16_t x) noexcept {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(x & 0x7fffu) << 13;
    const float magnitude = std::bit_cast<float>(rest) * 0x1p112F;  // subnormals, too
    const uint32_t special = x & 0x7fffu & ~0x3ffu;
    const uint32_t bits =
        special == 0x7c00u ? rest | 0x7f800000u : std::bit_cast<uint32_t>(magnitude);
    return std::bit_cast<float>(bits | sign);
  }
  // REQUIRES: as above; what is below the smallest subnormal becomes zero.
  static uint16_t from_float(float x) noexcept {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const float scaled = std::bit_cast<float>(bits & 0x7fffffffu) * 0x1p-112F;
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | std::bit_cast<uint32_t>(scaled) >> 13);
  }
};

// Round to nearest, ties to even. REQUIRES: |x| <= 448 or NaN.
uint8_t to_e4m3(float x) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  // Below 2^-6 a code counts units of 2^-9; the sum's last bit is such a unit.
  const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14F);
  const uint32_t code = magnitude < std::bit_cast<uint32_t>(0x1p-6F) ? subnormal : normal;
  return static_cast<uint8_t>((magnitude > 0x7f800000u ? kNan : code) | (bits >> 24 & 0x80u));
}

float from_e4m3(uint8_t code) noexcept {
  const uint32_t rest = code & 0x7fu;
  const float magnitude = std::bit_cast<float>(rest << 20) * 0x1p120F;
  const uint32_t bits = rest == kNan ? 0x7fc00000u : std::bit_cast<uint32_t>(magnitude);
  return std::bit_cast<float>(bits | static_cast<uint32_t>(code & 0x80u) << 24);
}

// The least s with largest <= 448 * 2^s, kept where 2^s and 2^-s are normal floats.
int scale_exponent(float largest) noexcept {
  if (largest == 0.0F) return -126;
  int exponent;
  const float mantissa = std::frexp(largest, &exponent);  // [0.5, 1); 448 = 0.875 * 2^9
  return std::clamp(exponent - 9 + (mantissa > 0.875F ? 1 : 0), -126, 126);
}

template <typename Element>
void encode_group(const uint8_t* from, uint32_t group, uint8_t* to) noexcept {
  uint16_t elements[BlockEncoding::kMaxGroup];
  std::memcpy(elements, from, group * sizeof *elements);
  uint32_t largest = 0;  // of the finite ones; positive floats are ordered as their bits
  for (uint32_t i = 0; i < group; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(Element::to_float(elements[i])) & 0x7fffffffu;
    largest = std::max(largest, bits < 0x7f800000u ? bits : 0);
  }
  const int exponent = scale_exponent(std::bit_cast<float>(largest));
  const float inverse = power_of_two(-exponent);
  *to++ = static_cast<uint8_t>(exponent + kBias);
  for (uint32_t i = 0; i < group; ++i) {
    const float x = Element::to_float(elements[i]) * inverse;
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const bool infinite = (bits & 0x7fffffffu) == 0x7f800000u;
    to[i] = to_e4m3(std::bit_cast<float>(bits | (infinite ? 1u : 0u)));
  }
}

template <typename Element>
void decode_group(const uint8_t* from, uint32_t group, uint8_t* to) noexcept {
  uint8_t codes[BlockEncoding::kMaxGroup];
  const float scale = power_of_two(std::clamp(*from - kBias, -126, 126));
  std::memcpy(codes, from + 1, group);
  for (uint32_t i = 0; i < group; ++i) {
    const float x = from_e4m3(codes[i]) * scale;
    // What was rounded up beyond the largest element of the type; the comparisons let NaN pass.
    const float clamped = x > Element::kLargest    ? Element::kLargest
                          : x < -Element::kLargest ? -Element::kLargest
                                                   : x;
    const uint16_t element = Element::from_float(clamped);
    std::memcpy(to + 2 * i, &element, sizeof element);
  }
}

template <typename Element>
void encode_all(const uint8_t* from, uint64_t bytes, uint32_t group, uint8_t* to) noexcept {
  for (uint64_t done = 0; done < bytes; done += 2 * group, to += group + 1) {
    encode_group<Element>(from + done, group, to);
  }
}

template <typename Element>
void decode_all(const uint8_t* from, uint64_t bytes, uint32_t group, uint8_t* to) noexcept {
  for (uint64_t done = 0; done < bytes; done += 2 * group, from += group + 1) {
    decode_group<Element>(from, group, to + done);
  }
}

}  // namespace

std::string BlockEncoding::to_string() const {
  switch (kind) {
    case Kind::kRaw:
      return "raw";
    case Kind::kFp8OfBfloat16:
      return "fp8_of_bfloat16 " + std::to_string(group);
    case Kind::kFp8OfFloat16:
      return "fp8_of_float16 " + std::to_string(group);
  }
  return "?";
}

void BlockEncoding::check(const BlockLayout& layout) const {
  if (raw() && group == 0) return;
  if (raw() || group == 0 || group % 8 != 0 || group > kMaxGroup) {
    throw Error(ErrorCode::kInvalidArgument,
                "block encoding: FP8 needs groups of 8 to " + std::to_string(kMaxGroup) +
                    " elements, a multiple of 8, and raw blocks none; got " +
                    std::to_string(group));
  }
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer) {
    for (uint32_t plane = 0; plane < layout.num_planes(layer); ++plane) {
      if (layout.plane_bytes(layer, plane) % (2 * group) == 0) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  "block encoding: layer " + std::to_string(layer) + " plane " +
                      std::to_string(plane) + " has " +
                      std::to_string(layout.plane_bytes(layer, plane)) +
                      " bytes a token, no whole number of groups of " + std::to_string(group) +
                      " 16-bit elements");
    }
  }
}

void BlockEncoding::encode(const uint8_t* from, uint64_t bytes, uint8_t* to) const noexcept {
  kind == Kind::kFp8OfFloat16 ? encode_all<Float16>(from, bytes, group, to)
                              : encode_all<Bfloat16>(from, bytes, group, to);
}

void BlockEncoding::decode(const uint8_t* from, uint64_t bytes, uint8_t* to) const noexcept {
  kind == Kind::kFp8OfFloat16 ? decode_all<Float16>(from, bytes, group, to)
                              : decode_all<Bfloat16>(from, bytes, group, to);
}

}  // namespace kvtransfer
