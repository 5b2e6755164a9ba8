// Launch of add_partials_rms_norm, callable from C: raw pointers, strides in elements, a stream.
#include "tokenspeed/add_partials_rms_norm.cuh"

namespace {

struct Call {
    const float* partials;
    float* residual;
    const void* weight;
    void* out;
    int splits, rows, size;
    int64_t stride_residual;
    float eps;
    cudaStream_t stream;
};

template <typename T, int kSplits, bool kEarly>
cudaError_t launch(const Call& c) {
    using namespace tokenspeed;
    const int threads = (c.size / (kNormBlocks * kNormWidth) + 31) / 32 * 32;
    if (c.size % (kNormBlocks * kNormWidth) || threads > 1024) return cudaErrorInvalidValue;
    return launch_early<kEarly>(add_partials_rms_norm<T, kSplits, kEarly>, dim3(kNormBlocks, c.rows), threads, 0, c.stream,
                                c.partials, c.residual, static_cast<const T*>(c.weight), static_cast<T*>(c.out),
                                static_cast<int64_t>(c.rows) * c.size, c.stride_residual, c.size, c.eps);
}

template <typename T, int kSplits>
cudaError_t launch(const Call& c, bool early) {
    return early ? launch<T, kSplits, true>(c) : launch<T, kSplits, false>(c);
}

template <typename T>
cudaError_t launch(const Call& c, bool early) {
    switch (c.splits) {
        case 1: return launch<T, 1>(c, early);
        case 2: return launch<T, 2>(c, early);
        case 3: return launch<T, 3>(c, early);
        case 4: return launch<T, 4>(c, early);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

// dtype of weight and out: 1 float16, 2 bfloat16. early: starts before the kernels ahead have ended. Returns a cudaError_t,
// 0 for success.
extern "C" int tokenspeed_add_partials_rms_norm(const float* partials, float* residual, const void* weight, void* out,
                                                int splits, int rows, int size, int64_t stride_residual, float eps,
                                                int dtype, int early, void* stream) {
    const Call call{partials, residual, weight,          out, splits,
                    rows,     size,     stride_residual, eps, static_cast<cudaStream_t>(stream)};
    switch (dtype) {
        case 1: return launch<__half>(call, early);
        case 2: return launch<__nv_bfloat16>(call, early);
        default: return cudaErrorInvalidValue;
    }
}
