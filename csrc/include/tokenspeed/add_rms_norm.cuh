// residual += x; out = rms_norm(residual) * weight. One block a row; the row stays in registers between the two passes.
#pragma once

#include "tokenspeed/vec.cuh"

namespace tokenspeed {

// Sum over a block of any whole number of warps, known to every thread afterwards.
__device__ inline float block_sum(float value) {
    __shared__ float of_warps[32];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : 0.0f;
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

// X, R and T are the dtypes of x, of the residual stream, and of weight and out. size is a multiple of kWidth and at
// most kVecs * blockDim.x of them; rows start on 16 bytes.
constexpr int kWidth = 8;

template <typename X, typename R, typename T, int kVecs>
__global__ void add_rms_norm(const X* x, R* residual, const T* weight, T* out, int64_t stride_x,
                             int64_t stride_residual, int size, float eps) {
    const int64_t row = blockIdx.x;
    const X* x_row = x + row * stride_x;
    R* residual_row = residual + row * stride_residual;
    T* out_row = out + row * size;
    Vec<R, kWidth> kept[kVecs];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * kWidth;
        if (at >= size) continue;
        Vec<X, kWidth> added;
        added.load(x_row + at);
        kept[i].load(residual_row + at);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            kept[i].data[j] = from_float<R>(to_float(kept[i].data[j]) + to_float(added.data[j]));
            const float value = to_float(kept[i].data[j]);
            squares += value * value;
        }
        kept[i].store(residual_row + at);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / size + eps);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * kWidth;
        if (at >= size) continue;
        Vec<T, kWidth> gain, result;
        gain.load(weight + at);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            // Rounded before the weight, as transformers' Llama does it.
            const float normed = to_float(from_float<R>(to_float(kept[i].data[j]) * scale));
            result.data[j] = from_float<T>(normed * to_float(gain.data[j]));
        }
        result.store(out_row + at);
    }
}

}  // namespace tokenspeed
