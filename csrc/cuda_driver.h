// The few functions of NVIDIA's driver that a step needs. The library is opened at run time, so that
// the core builds and loads without CUDA. Functions return 0, or the driver's error number.
#pragma once

#include <string>

namespace quire {

struct CudaDriver {
    static constexpr int kNotReady = 600;

    // Opens the library and finds its functions. Throws a std::runtime_error that says what is
    // missing. path: such as libcuda.so.1, which finds the library that the process has open.
    explicit CudaDriver(const std::string& path);

    // Throws a std::runtime_error with the call's name and the driver's name of the error.
    void check(int error, const char* call) const;
    std::string describe(int error, const char* call) const;

    int (*get_context)(void** context);
    int (*set_context)(void* context);
    int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z,
                         unsigned shared_bytes, void* stream, void** parameters, void** extra);
    int (*launch_graph)(void* graph, void* stream);
    int (*create_event)(void** event, unsigned flags);
    int (*destroy_event)(void* event);
    int (*record_event)(void* event, void* stream);
    int (*query_event)(void* event);

   private:
    int (*error_name_)(int error, const char** name);
};

}  // namespace quire
