// Programmatic dependent launch: a kernel that starts while the one before it in the stream still runs. Until it has waited
// it touches nothing but weights; then it lets the next one start (tokenspeed/kernels/triton/pdl.py has the whole rule).
#pragma once

namespace tokenspeed {

template <bool kEarly>
__device__ inline void wait_early() {
    if constexpr (kEarly) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    }
}

// Launches `kernel`, with kEarly before the kernels ahead have ended.
template <bool kEarly, typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream,
                         Arguments... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = kEarly ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace tokenspeed
