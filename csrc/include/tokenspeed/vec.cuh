// Loads and stores of 16 bytes, and conversions of what they hold to and from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace tokenspeed {

// kSize values, loaded 16 bytes at a time: from where and to where must be so aligned.
template <typename T, int kSize>
struct Vec {
    static constexpr int kParts = kSize * sizeof(T) / 16;
    static_assert(kSize * sizeof(T) % 16 == 0);
    alignas(16) T data[kSize];

    __device__ void load(const T* from) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) reinterpret_cast<uint4*>(data)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    __device__ void store(T* to) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(data)[i];
    }
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

}  // namespace tokenspeed
