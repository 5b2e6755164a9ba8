// Products of up to 8 rows, y = x W^T, bound by reading W once: its bytes are on their way before x is there.
//
// A block has a tile of weight rows and a span of K. Pieces of the tile come through a ring in shared memory (cp.async),
// which is filled before the wait for the kernel ahead (programmatic dependent launch): while that still runs, no room for
// weights is left empty. The rows of x, few and in L2, come to registers some steps ahead of their use. Weight rows are the
// M side of mma.m16n8k16 and rows of x the N side. K may be permuted as long as both sides agree, so a lane takes 16 bytes,
// 8 of K, of each row at once: two MMAs' worth, the first its even pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "tokenspeed/vec.cuh"

namespace tokenspeed {

constexpr int kFewRowsThreads = 128;
constexpr int kFewRowsTokens = 8;  // rows of x at most, the N of an MMA

__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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

// How a product is cut. kRows: weight rows of a block (gate's and up's together). kDepth: of K at a time. kStages: pieces
// of so many rows and so much of K in shared memory. kGated: SwiGLU of gate's rows and up's.
template <int kRows_, int kDepth_, int kStages_, bool kGated_>
struct FewRowsTile {
    static constexpr int kRows = kRows_, kDepth = kDepth_, kStages = kStages_;
    static constexpr bool kGated = kGated_;
    static constexpr int kCols = kGated ? kRows / 2 : kRows;  // of the output
    static constexpr int kPieces = kDepth / 8;                // of 16 bytes, in a weight row
    static constexpr int kAtOnce = kFewRowsThreads / kPieces;  // weight rows that all threads copy a piece of
    static constexpr int kCopies = kRows / kAtOnce;
    static constexpr int kDepthWarps = kDepth / 32 < 4 ? kDepth / 32 : 4, kRowWarps = 4 / kDepthWarps;
    static constexpr int kGroups = kDepth / 32 / kDepthWarps;  // 32 of K, of a warp
    static constexpr int kMmas = kRows / 16 / kRowWarps;       // blocks of 16 weight rows, of a warp
    static constexpr int kPitch = kRows + 4;  // of sums: no two lanes of a warp meet in a bank
    static constexpr int kAhead = 4;          // steps that x is loaded ahead
    static constexpr int kShared = kStages * kRows * kDepth * 2;
    static_assert(kAtOnce % 2 == 0 && (!kGated || kAtOnce == 16), "a thread's rows are alike");
    static_assert(kDepthWarps * kFewRowsTokens * kPitch * 4 <= kShared, "sums take the ring's place");
};

// out [splits, rows, num_out]: block (n, s) has tile n over K from s * span. num_out is a multiple of Tile::kCols, size and
// span of Tile::kDepth; rows <= kFewRowsTokens; rows of x and weight start on 16 bytes. kEarly: launched with PDL.
template <typename T, typename Out, typename Tile, bool kEarly>
__global__ void __launch_bounds__(kFewRowsThreads, 2)
    few_rows(const T* __restrict__ x, const T* __restrict__ weight, Out* __restrict__ out, int rows, int num_out, int size,
             int span, int64_t stride_x, int64_t stride_w) {
    constexpr int kStage = Tile::kRows * Tile::kPieces;
    extern __shared__ __align__(128) uint4 ring[];  // [kStages, kRows, kPieces]; odd rows' pieces are swapped by fours
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int first = blockIdx.y * span, steps = min(span, size - first) / Tile::kDepth;

    // With kGated, 8 rows of gate and 8 of up take turns, so that a lane's sums are of both.
    const int piece = thread % Tile::kPieces, line = thread / Tile::kPieces;
    const int row = Tile::kGated ? blockIdx.x * Tile::kCols + line % 8 + line / 8 * num_out : blockIdx.x * Tile::kRows + line;
    const T* from = weight + row * stride_w + first + piece * 8;
    const int64_t skip = (Tile::kGated ? Tile::kAtOnce / 2 : Tile::kAtOnce) * stride_w;
    uint4* const to = ring + line * Tile::kPieces + (piece ^ (line & 1) * 4);
    const auto fetch = [&](int step) {
        uint4* const stage = to + step % Tile::kStages * kStage;
        if (step < steps)
#pragma unroll
            for (int i = 0; i < Tile::kCopies; ++i)
                copy_async(stage + i * Tile::kAtOnce * Tile::kPieces, from + i * skip + step * Tile::kDepth);
        commit_copies();  // an empty group beyond the end, so that counts stay true
    };
    for (int step = 0; step < Tile::kStages - 1; ++step) fetch(step);
    if (kEarly) {
        wait_for_kernels_before();
        let_next_kernel_start();
    }

    const int depth_warp = warp % Tile::kDepthWarps, row_warp = warp / Tile::kDepthWarps;
    const int group = lane / 4, quarter = lane % 4;
    const int depth = depth_warp * Tile::kGroups * 32 + quarter * 8;
    const T* const x_at = x + group * stride_x + first + depth;
    uint4 ahead[Tile::kAhead][Tile::kGroups];
    const auto take_x = [&](uint4 (&values)[Tile::kGroups], int step) {
#pragma unroll
        for (int i = 0; i < Tile::kGroups; ++i)  // by L2: L1 may hold what lay there before
            values[i] = step < steps && group < rows
                            ? __ldcg(reinterpret_cast<const uint4*>(x_at + step * Tile::kDepth + i * 32))
                            : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < Tile::kAhead; ++i) take_x(ahead[i], i);

    float sum[Tile::kMmas][4] = {};
    for (int base = 0; base < steps; base += Tile::kAhead) {
#pragma unroll
        for (int i = 0; i < Tile::kAhead; ++i) {
            const int step = base + i;
            if (step >= steps) break;
            await_copies<Tile::kStages - 2>();
            __syncthreads();  // everyone's copies are there, and the stage before is read
            fetch(step + Tile::kStages - 1);
            const uint4* stage = ring + step % Tile::kStages * kStage;
#pragma unroll
            for (int k = 0; k < Tile::kGroups; ++k)
#pragma unroll
                for (int m = 0; m < Tile::kMmas; ++m) {
                    const int low = (row_warp * Tile::kMmas + m) * 16 + group;
                    const int at = ((depth_warp * Tile::kGroups + k) * 4 + quarter) ^ (low & 1) * 4;
                    const uint4 a = stage[low * Tile::kPieces + at], b = stage[(low + 8) * Tile::kPieces + at];
                    const uint4 v = ahead[i][k];
                    mma<T>(sum[m], a.x, b.x, a.y, b.y, v.x, v.y);
                    mma<T>(sum[m], a.z, b.z, a.w, b.w, v.z, v.w);
                }
            take_x(ahead[i], step + Tile::kAhead);
        }
    }

    // Warps that share rows add their sums, always in the same order.
    await_copies<0>();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(ring);  // [kDepthWarps, kFewRowsTokens, kPitch]
#pragma unroll
    for (int m = 0; m < Tile::kMmas; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = quarter * 2 + i % 2, low = (row_warp * Tile::kMmas + m) * 16 + group + i / 2 * 8;
            sums[(depth_warp * kFewRowsTokens + token) * Tile::kPitch + low] = sum[m][i];
        }
    __syncthreads();
    const auto total = [&](int token, int low) {
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < Tile::kDepthWarps; ++i) value += sums[(i * kFewRowsTokens + token) * Tile::kPitch + low];
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
