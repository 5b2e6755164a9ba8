// Launch of the products of few rows, callable from C: raw pointers, strides in elements, a stream.
#include "tokenspeed/few_rows.cuh"

namespace {

using tokenspeed::FewRowsTile;

struct Call {
    const void* x;
    const void* weight;
    void* out;
    int rows, num_out, size, span;
    int64_t stride_x, stride_w;
    bool early;
    cudaStream_t stream;
};

template <typename T, typename Out, typename Tile, bool kEarly>
cudaError_t launch(const Call& c) {
    if (c.num_out % Tile::kCols || c.size % Tile::kDepth || c.span % Tile::kDepth || c.rows > Tile::kTokens)
        return cudaErrorInvalidValue;
    const auto kernel = tokenspeed::few_rows<T, Out, Tile, kEarly>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kShared);
    if (error != cudaSuccess) return error;
    const dim3 grid(c.num_out / Tile::kCols, (c.size + c.span - 1) / c.span);
    return tokenspeed::launch_early<kEarly>(kernel, grid, tokenspeed::kFewRowsThreads, Tile::kShared, c.stream,
                                            static_cast<const T*>(c.x), static_cast<const T*>(c.weight),
                                            static_cast<Out*>(c.out), c.rows, c.num_out, c.size, c.span, c.stride_x,
                                            c.stride_w);
}

template <typename T, typename Out, int kRows, int kDepth, int kTokens, bool kGated>
cudaError_t launch(const Call& c) {
    using Tile = FewRowsTile<kRows, kDepth, kTokens, kGated>;
    return c.early ? launch<T, Out, Tile, true>(c) : launch<T, Out, Tile, false>(c);
}

template <typename T, typename Out, int kRows, int kDepth, bool kGated>
cudaError_t launch(const Call& c) {
    return c.rows <= 8 ? launch<T, Out, kRows, kDepth, 8, kGated>(c) : launch<T, Out, kRows, kDepth, 16, kGated>(c);
}

template <typename T>
cudaError_t launch(const Call& c, int op) {
    switch (op) {
        case 0: return launch<T, T, 32, 256, false>(c);
        case 1: return launch<T, float, 64, 128, false>(c);
        case 2: return launch<T, T, 128, 128, true>(c);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

// op: 0 linear_rows, 1 linear_sums (out: float32), 2 gate_up_silu (num_out: of the output). dtype of x, weight, out: 1
// float16, 2 bfloat16. early: starts before the kernels ahead have ended. Returns a cudaError_t, 0 for success.
extern "C" int tokenspeed_few_rows(const void* x, const void* weight, void* out, int rows, int num_out, int size, int span,
                                   int64_t stride_x, int64_t stride_w, int op, int dtype, int early, void* stream) {
    const Call call{x,    weight,   out,      rows,       num_out, size,
                    span, stride_x, stride_w, early != 0, static_cast<cudaStream_t>(stream)};
    switch (dtype) {
        case 1: return launch<__half>(call, op);
        case 2: return launch<__nv_bfloat16>(call, op);
        default: return cudaErrorInvalidValue;
    }
}
