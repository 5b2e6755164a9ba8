// residual += the sum of partial sums; out = rms_norm(residual) * weight. A cluster of blocks a row: one multiprocessor
// would take as long to read a row's partial sums as all else does.
#pragma once

#include <cooperative_groups.h>

#include "tokenspeed/add_rms_norm.cuh"
#include "tokenspeed/pdl.cuh"

namespace tokenspeed {

constexpr int kNormBlocks = 8;  // of a row, the most that a cluster has everywhere
constexpr int kNormWidth = 4;   // values a thread

// partials [kSplits, rows, size], out [rows, size]. Block (i, row) has part i of the row; size is a multiple of
// kNormBlocks * kNormWidth, a block has a thread for each kNormWidth of its part. kEarly: launched with PDL.
template <typename T, int kSplits, bool kEarly>
__global__ void __cluster_dims__(kNormBlocks, 1, 1)
    add_partials_rms_norm(const float* partials, float* residual, const T* weight, T* out, int64_t stride_split,
                          int64_t stride_residual, int size, float eps) {
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    __shared__ float of_blocks[kNormBlocks];
    auto started = cluster.barrier_arrive();  // no block's memory is there before it has started
    const int part = size / kNormBlocks, at = threadIdx.x * kNormWidth, column = blockIdx.x * part + at;
    const int64_t row = blockIdx.y;
    const bool inside = at < part;
    uint2 gain{};
    if (inside) gain = *reinterpret_cast<const uint2*>(weight + column);
    wait_early<kEarly>();

    float values[kNormWidth] = {};
    float squares = 0.0f;
    if (inside) {
        // By L2: L1 may hold what lay there before.
        float4* const kept = reinterpret_cast<float4*>(residual + row * stride_residual + column);
        const float4 before = __ldcg(kept);
        float4 added[kSplits];
#pragma unroll
        for (int i = 0; i < kSplits; ++i)
            added[i] = __ldcg(reinterpret_cast<const float4*>(partials + i * stride_split + row * size + column));
#pragma unroll
        for (int i = 1; i < kSplits; ++i) {
            added[0].x += added[i].x, added[0].y += added[i].y;
            added[0].z += added[i].z, added[0].w += added[i].w;
        }
        values[0] = added[0].x + before.x, values[1] = added[0].y + before.y;
        values[2] = added[0].z + before.z, values[3] = added[0].w + before.w;
        *kept = make_float4(values[0], values[1], values[2], values[3]);
#pragma unroll
        for (int i = 0; i < kNormWidth; ++i) squares += values[i] * values[i];
    }
    squares = block_sum(squares);
    cluster.barrier_wait(std::move(started));
    if (threadIdx.x < kNormBlocks) cluster.map_shared_rank(of_blocks, threadIdx.x)[cluster.block_rank()] = squares;
    cluster.sync();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kNormBlocks; ++i) total += of_blocks[i];
    const float scale = 1.0f / sqrtf(total / size + eps);
    if (inside) {
        const T* const gains = reinterpret_cast<const T*>(&gain);
        uint2 result;
#pragma unroll
        for (int i = 0; i < kNormWidth; ++i)
            reinterpret_cast<T*>(&result)[i] = from_float<T>(values[i] * scale * to_float(gains[i]));
        *reinterpret_cast<uint2*>(out + row * size + column) = result;
    }
}

}  // namespace tokenspeed
