// Products of up to 16 rows, y = x W^T, bound by reading W once: its bytes are on their way before x is there.
//
// A block has a tile of weight rows and a span of K. Pieces of the tile come through a ring in shared memory (cp.async),
// which is filled before the wait for the kernel ahead (programmatic dependent launch): while that still runs, no room for
// weights is left empty. The rows of x come the same way, by L2: L1 may hold what lay there before. Weight rows are the M
// side of mma.m16n8k16 and rows of x the N side. K may be permuted as long as both sides agree, so a lane takes 16 bytes,
// 8 of K, of each row at once: two MMAs' worth, the first its even pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "tokenspeed/pdl.cuh"
#include "tokenspeed/vec.cuh"

namespace tokenspeed {

constexpr int kFewRowsThreads = 128;
constexpr int kFewRowsShared = 110 * 1024;  // bytes of shared memory at most: two blocks a multiprocessor

__device__ inline void copy_async(void* to, const void* from) {
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups of copies are under way.
template <int kPending>
__device__ inline void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

template <typename T>
__device__ inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
#define TOKENSPEED_MMA(T, NAME)                                                                                     \
    template <>                                                                                                     \
    __device__ inline void mma<T>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,   \
                                  uint32_t b1) {                                                                    \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                         \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                         \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                               \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                       \
    }
TOKENSPEED_MMA(__half, "f16")
TOKENSPEED_MMA(__nv_bfloat16, "bf16")
#undef TOKENSPEED_MMA

// How a product is cut. kRows: weight rows of a block (gate's and up's together). kDepth: of K at a time. kTokens: rows of
// x at most, 8 or 16. kGated: SwiGLU of gate's rows and up's.
template <int kRows_, int kDepth_, int kTokens_, bool kGated_>
struct FewRowsTile {
    static constexpr int kRows = kRows_, kDepth = kDepth_, kTokens = kTokens_;
    static constexpr bool kGated = kGated_;
    static constexpr int kCols = kGated ? kRows / 2 : kRows;  // of the output
    static constexpr int kPieces = kDepth / 8;                // of 16 bytes, in a row of the weight or of x
    static constexpr int kAtOnce = kFewRowsThreads / kPieces;  // rows that all threads copy a piece of
    static constexpr int kCopies = kRows / kAtOnce, kCopiesOfX = (kTokens + kAtOnce - 1) / kAtOnce;
    static constexpr int kStage = (kRows + kTokens) * kPieces;  // pieces
    static constexpr int kStages = kFewRowsShared / (kStage * 16) < 6 ? kFewRowsShared / (kStage * 16) : 6;
    static constexpr int kShared = kStages * kStage * 16;
    static constexpr int kDepthWarps = kDepth / 32 < 4 ? kDepth / 32 : 4, kRowWarps = 4 / kDepthWarps;
    static constexpr int kGroups = kDepth / 32 / kDepthWarps;  // 32 of K, of a warp
    static constexpr int kMmas = kRows / 16 / kRowWarps;       // blocks of 16 weight rows, of a warp
    static constexpr int kTiles = kTokens / 8;                 // blocks of 8 rows of x
    static constexpr int kPitch = kRows + 4;  // of sums: no two lanes of a warp meet in a bank
    static_assert(kAtOnce % 2 == 0 && (!kGated || kAtOnce % 8 == 0), "a thread's rows are alike");
    static_assert(kDepthWarps * kTokens * kPitch * 4 <= kShared, "sums take the ring's place");
};

// out [splits, rows, num_out]: block (n, s) has tile n over K from s * span. num_out is a multiple of Tile::kCols, size and
// span of Tile::kDepth; rows <= Tile::kTokens; rows of x and weight start on 16 bytes. kEarly: launched with PDL.
template <typename T, typename Out, typename Tile, bool kEarly>
__global__ void __launch_bounds__(kFewRowsThreads, 2)
    few_rows(const T* __restrict__ x, const T* __restrict__ weight, Out* __restrict__ out, int rows, int num_out, int size,
             int span, int64_t stride_x, int64_t stride_w) {
    constexpr int kAhead = Tile::kStages - 1;  // pieces under way
    extern __shared__ __align__(128) uint4 ring[];  // [kStages, kRows + kTokens, kPieces]; odd rows' pieces swapped by fours
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int first = blockIdx.y * span, steps = min(span, size - first) / Tile::kDepth;

    // With kGated, 8 rows of gate and 8 of up take turns, so that a lane's sums are of both.
    const int piece = thread % Tile::kPieces, line = thread / Tile::kPieces;
    const auto row_of = [&](int line) { return Tile::kGated ? line / 16 * 8 + line % 8 + line / 8 % 2 * num_out : line; };
    const T* const from = weight + (blockIdx.x * Tile::kCols + row_of(line)) * stride_w + first + piece * 8;
    uint4* const to = ring + line * Tile::kPieces + (piece ^ (line & 1) * 4);
    const auto fetch_weights = [&](int step) {
        uint4* const stage = to + step % Tile::kStages * Tile::kStage;
#pragma unroll
        for (int i = 0; i < Tile::kCopies; ++i)
            copy_async(stage + i * Tile::kAtOnce * Tile::kPieces,
                       from + row_of(i * Tile::kAtOnce) * stride_w + step * Tile::kDepth);
    };
    // Rows of x that are not there are not written: what lies in their place comes to sums that are not stored.
    const T* const from_x = x + line * stride_x + first + piece * 8;
    uint4* const to_x = to + Tile::kRows * Tile::kPieces;
    const auto each_of_x = [&](int step, auto copy) {
        uint4* const stage = to_x + step % Tile::kStages * Tile::kStage;
#pragma unroll
        for (int i = 0; i < Tile::kCopiesOfX; ++i)
            if (line + i * Tile::kAtOnce < rows)
                copy(i, stage + i * Tile::kAtOnce * Tile::kPieces, from_x + i * Tile::kAtOnce * stride_x + step * Tile::kDepth);
    };
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
        if (step < steps) fetch_weights(step);
        commit_copies();  // an empty group beyond the end, so that counts stay true
    }
    wait_early<kEarly>();
    // The first of x by registers: a copy's group would end only after all weights asked for before it.
    uint4 early_x[kAhead][Tile::kCopiesOfX];
#pragma unroll
    for (int step = 0; step < kAhead; ++step)
        if (step < steps) each_of_x(step, [&](int i, uint4*, const T* at) { early_x[step][i] = __ldcg(reinterpret_cast<const uint4*>(at)); });
#pragma unroll
    for (int step = 0; step < kAhead; ++step)
        if (step < steps) each_of_x(step, [&](int i, uint4* at, const T*) { *at = early_x[step][i]; });

    const int depth_warp = warp % Tile::kDepthWarps, row_warp = warp / Tile::kDepthWarps;
    const int group = lane / 4, quarter = lane % 4;
    float sum[Tile::kMmas][Tile::kTiles][4] = {};
    for (int step = 0; step < steps; ++step) {
        await_copies<kAhead - 1>();
        __syncthreads();  // everyone's copies are there, and the stage before is read
        if (step + kAhead < steps) {
            fetch_weights(step + kAhead);
            each_of_x(step + kAhead, [](int, uint4* at, const T* source) { copy_async(at, source); });
        }
        commit_copies();
        const uint4* const stage = ring + step % Tile::kStages * Tile::kStage;
#pragma unroll
        for (int k = 0; k < Tile::kGroups; ++k) {
            const int at = ((depth_warp * Tile::kGroups + k) * 4 + quarter) ^ (group & 1) * 4;
            uint4 values[Tile::kTiles];
#pragma unroll
            for (int t = 0; t < Tile::kTiles; ++t) values[t] = stage[(Tile::kRows + t * 8 + group) * Tile::kPieces + at];
#pragma unroll
            for (int m = 0; m < Tile::kMmas; ++m) {
                const int low = (row_warp * Tile::kMmas + m) * 16 + group;
                const uint4 a = stage[low * Tile::kPieces + at], b = stage[(low + 8) * Tile::kPieces + at];
#pragma unroll
                for (int t = 0; t < Tile::kTiles; ++t) {
                    mma<T>(sum[m][t], a.x, b.x, a.y, b.y, values[t].x, values[t].y);
                    mma<T>(sum[m][t], a.z, b.z, a.w, b.w, values[t].z, values[t].w);
                }
            }
        }
    }

    // Warps that share rows add their sums, always in the same order.
    await_copies<0>();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(ring);  // [kDepthWarps, kTokens, kPitch]
#pragma unroll
    for (int m = 0; m < Tile::kMmas; ++m)
#pragma unroll
        for (int t = 0; t < Tile::kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = t * 8 + quarter * 2 + i % 2, low = (row_warp * Tile::kMmas + m) * 16 + group + i / 2 * 8;
                sums[(depth_warp * Tile::kTokens + token) * Tile::kPitch + low] = sum[m][t][i];
            }
    __syncthreads();
    const auto total = [&](int token, int low) {
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < Tile::kDepthWarps; ++i) value += sums[(i * Tile::kTokens + token) * Tile::kPitch + low];
        return value;
    };
    for (int i = thread; i < rows * Tile::kCols; i += kFewRowsThreads) {
        const int token = i / Tile::kCols, col = i % Tile::kCols;
        float value;
        if (Tile::kGated) {
            const int low = col / 8 * 16 + col % 8;
            const float gate = total(token, low);
            value = gate / (1.0f + __expf(-gate)) * total(token, low + 8);
        } else {
            value = total(token, col);
        }
        out[(static_cast<int64_t>(blockIdx.y) * rows + token) * num_out + blockIdx.x * Tile::kCols + col] =
            from_float<Out>(value);
    }
}

}  // namespace tokenspeed
