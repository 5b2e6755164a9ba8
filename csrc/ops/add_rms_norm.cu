// Launch of add_rms_norm, callable from C: raw pointers, strides in elements, a stream.
#include <algorithm>

#include "tokenspeed/add_rms_norm.cuh"

namespace {

constexpr int kVecs = 4;

template <typename T>
cudaError_t launch(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t stride_x,
                   int64_t stride_residual, int size, float eps, cudaStream_t stream) {
    const int vecs = size / tokenspeed::Vec<T>::kSize;
    const int threads = std::min(std::max((vecs + 31) / 32 * 32, 32), 1024);
    if (size % tokenspeed::Vec<T>::kSize != 0 || vecs > kVecs * threads) return cudaErrorInvalidValue;
    tokenspeed::add_rms_norm<T, kVecs><<<rows, threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight), static_cast<T*>(out),
        stride_x, stride_residual, size, eps);
    return cudaGetLastError();
}

}  // namespace

// dtype: 0 float32, 1 float16, 2 bfloat16. Returns a cudaError_t, 0 for success.
extern "C" int tokenspeed_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                                       int64_t stride_x, int64_t stride_residual, int size, float eps, int dtype,
                                       void* stream) {
    auto on = static_cast<cudaStream_t>(stream);
    switch (dtype) {
        case 0: return launch<float>(x, residual, weight, out, rows, stride_x, stride_residual, size, eps, on);
        case 1: return launch<__half>(x, residual, weight, out, rows, stride_x, stride_residual, size, eps, on);
        case 2:
            return launch<__nv_bfloat16>(x, residual, weight, out, rows, stride_x, stride_residual, size, eps, on);
        default: return cudaErrorInvalidValue;
    }
}
