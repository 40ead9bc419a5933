// Logit dtypes: 16 bytes to floats and back, rounded to nearest even. On the host in software, so that any g++ will do.
#pragma once

#include <string.h>

#include "grpo_rows.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

struct alignas(16) Vec16 {
  uint32_t words[4];
};

GRPO_HD float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, 4);
  return value;
#endif
}

GRPO_HD uint32_t bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
#endif
}

struct Float32 {
  using Bits = uint32_t;
  static constexpr int PER_VECTOR = 4;
  static constexpr uint32_t MINUS_INFINITY = 0xff800000u;  // one word of a vector
  GRPO_HD static float load(Bits bits) { return float_of_bits(bits); }
  GRPO_HD static Bits store(float value) { return bits_of_float(value); }
  GRPO_HD static uint32_t pack(const float* values) { return bits_of_float(values[0]); }
  GRPO_HD static void unpack(uint32_t word, float* values) { values[0] = float_of_bits(word); }
};

struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr int PER_VECTOR = 8;
  static constexpr uint32_t MINUS_INFINITY = 0xff80ff80u;
  GRPO_HD static float load(Bits bits) { return float_of_bits(uint32_t(bits) << 16); }
  GRPO_HD static Bits store(float value) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t bits = bits_of_float(value);
    if (value != value) return 0x7fff;
    return Bits((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  }
  GRPO_HD static uint32_t pack(const float* values) {
#if defined(__CUDA_ARCH__)
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);  // one conversion for two
    return uint32_t(__bfloat16_as_ushort(pair.x)) | uint32_t(__bfloat16_as_ushort(pair.y)) << 16;
#else
    return uint32_t(store(values[0])) | uint32_t(store(values[1])) << 16;
#endif
  }
  GRPO_HD static void unpack(uint32_t word, float* values) {
    values[0] = float_of_bits(word << 16);
    values[1] = float_of_bits(word & 0xffff0000u);
  }
};

#if !defined(__CUDA_ARCH__)
inline float float_of_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 1023u;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float subnormal = float(fraction) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 rounds to a multiple of 2^-24, the spacing of float32 there and of subnormal halves.
    const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    return uint16_t(sign | rounded);
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
#endif

struct Float16 {
  using Bits = uint16_t;
  static constexpr int PER_VECTOR = 8;
  static constexpr uint32_t MINUS_INFINITY = 0xfc00fc00u;
  GRPO_HD static float load(Bits bits) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(bits));
#else
    return float_of_half(bits);
#endif
  }
  GRPO_HD static Bits store(float value) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(value));
#else
    return half_of_float(value);
#endif
  }
  GRPO_HD static uint32_t pack(const float* values) {
    return uint32_t(store(values[0])) | uint32_t(store(values[1])) << 16;
  }
  GRPO_HD static void unpack(uint32_t word, float* values) {
    values[0] = load(Bits(word & 0xffffu));
    values[1] = load(Bits(word >> 16));
  }
};

template <class T>
GRPO_HD void unpack_vector(const Vec16& vector, float (&values)[T::PER_VECTOR]) {
  GRPO_UNROLL
  for (int i = 0; i < 4; ++i) T::unpack(vector.words[i], values + i * (T::PER_VECTOR / 4));
}

template <class T>
GRPO_HD Vec16 pack_vector(const float (&values)[T::PER_VECTOR]) {
  Vec16 vector;
  GRPO_UNROLL
  for (int i = 0; i < 4; ++i) vector.words[i] = T::pack(values + i * (T::PER_VECTOR / 4));
  return vector;
}

template <class T>
GRPO_HD Vec16 minus_infinity_vector() {
  return Vec16{{T::MINUS_INFINITY, T::MINUS_INFINITY, T::MINUS_INFINITY, T::MINUS_INFINITY}};
}
