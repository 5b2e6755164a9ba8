// Launch of add_rms_norm, callable from C: raw pointers, strides in elements, a stream.
#include <algorithm>

#include "tokenspeed/add_rms_norm.cuh"

namespace {

constexpr int kVecs = 4;

struct Call {
    const void* x;
    void* residual;
    const void* weight;
    void* out;
    int64_t rows, stride_x, stride_residual;
    int size;
    float eps;
    cudaStream_t stream;
};

template <typename X, typename R, typename T>
cudaError_t launch(const Call& c) {
    const int vecs = c.size / tokenspeed::kWidth;
    const int threads = std::min(std::max((vecs + 31) / 32 * 32, 32), 1024);
    if (c.size % tokenspeed::kWidth != 0 || vecs > kVecs * threads) return cudaErrorInvalidValue;
    tokenspeed::add_rms_norm<X, R, T, kVecs><<<c.rows, threads, 0, c.stream>>>(
        static_cast<const X*>(c.x), static_cast<R*>(c.residual), static_cast<const T*>(c.weight),
        static_cast<T*>(c.out), c.stride_x, c.stride_residual, c.size, c.eps);
    return cudaGetLastError();
}

// x and the residual stream have the weight's dtype or are float32.
template <typename T>
cudaError_t launch(const Call& c, bool wide_x, bool wide_residual) {
    if (wide_x) return wide_residual ? launch<float, float, T>(c) : launch<float, T, T>(c);
    return wide_residual ? launch<T, float, T>(c) : launch<T, T, T>(c);
}

}  // namespace

// dtype of the weight: 0 float32, 1 float16, 2 bfloat16. Returns a cudaError_t, 0 for success.
extern "C" int tokenspeed_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                                       int64_t stride_x, int64_t stride_residual, int size, float eps, int dtype,
                                       int wide_x, int wide_residual, void* stream) {
    const Call call{x,      residual, weight, out, rows, stride_x, stride_residual, size,
                    eps,    static_cast<cudaStream_t>(stream)};
    switch (dtype) {
        case 0: return launch<float, float, float>(call);
        case 1: return launch<__half>(call, wide_x, wide_residual);
        case 2: return launch<__nv_bfloat16>(call, wide_x, wide_residual);
        default: return cudaErrorInvalidValue;
    }
}
