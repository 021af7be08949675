#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace quire {
namespace {

template <class Function>
void find(void* library, const std::string& path, const char* name, Function& found) {
    found = reinterpret_cast<Function>(dlsym(library, name));
    if (found == nullptr) throw std::runtime_error(path + " has no " + name);
}

}  // namespace

CudaDriver::CudaDriver(const std::string& path) {
    // Never closed: the process may hold objects of the driver until its end.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        throw std::runtime_error("the CUDA driver cannot be opened: " +
                                 (reason == nullptr ? path : std::string(reason)));
    }
    find(library, path, "cuCtxGetCurrent", get_context);
    find(library, path, "cuCtxSetCurrent", set_context);
    find(library, path, "cuLaunchKernel", launch_kernel);
    find(library, path, "cuGraphLaunch", launch_graph);
    find(library, path, "cuEventCreate", create_event);
    find(library, path, "cuEventDestroy_v2", destroy_event);
    find(library, path, "cuEventRecord", record_event);
    find(library, path, "cuEventQuery", query_event);
    find(library, path, "cuGetErrorName", error_name_);
}

void CudaDriver::check(int error, const char* call) const {
    if (error != 0) throw std::runtime_error(describe(error, call));
}

std::string CudaDriver::describe(int error, const char* call) const {
    const char* name = nullptr;
    if (error_name_(error, &name) != 0 || name == nullptr) name = "unknown error";
    return std::string(call) + ": " + name + " (" + std::to_string(error) + ")";
}

}  // namespace quire
