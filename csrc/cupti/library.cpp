#include "library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace nvrx {

namespace {

template <typename Function>
void find(void* handle, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
}

template <typename Function>
void require(void* handle, Function& function, const char* name, const std::string& path) {
    find(handle, function, name);
    if (function == nullptr) throw std::runtime_error(path + " has no " + name);
}

}  // namespace

Library::Library(const std::string& path) : path(path) {
    // It is never closed: the driver may call it until the process ends.
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw std::runtime_error(dlerror());
    require(handle, get_version, "cuptiGetVersion", path);
    require(handle, get_result_string, "cuptiGetResultString", path);
    require(handle, get_timestamp, "cuptiGetTimestamp", path);
    require(handle, subscribe, "cuptiSubscribe", path);
    require(handle, unsubscribe, "cuptiUnsubscribe", path);
    require(handle, register_callbacks, "cuptiActivityRegisterCallbacks", path);
    require(handle, enable, "cuptiActivityEnable", path);
    require(handle, disable, "cuptiActivityDisable", path);
    require(handle, flush_all, "cuptiActivityFlushAll", path);
    require(handle, next_record, "cuptiActivityGetNextRecord", path);
    require(handle, dropped_records, "cuptiActivityGetNumDroppedRecords", path);
    require(handle, push_external, "cuptiActivityPushExternalCorrelationId", path);
    require(handle, pop_external, "cuptiActivityPopExternalCorrelationId", path);
    find(handle, register_timestamp, "cuptiActivityRegisterTimestampCallback");
    find(handle, enable_runtime_call, "cuptiActivityEnableRuntimeApi");
    find(handle, enable_driver_call, "cuptiActivityEnableDriverApi");
    check(get_version(&version), "cuptiGetVersion");
    if (version < abi::kOldestVersion || version >= abi::kFirstUnknownVersion) {
        throw std::runtime_error(path + " has the CUPTI API version " + std::to_string(version) +
                                 ": those of CUDA 11 to 13 are known");
    }
}

void Library::check(int result, const char* call) const {
    if (result == abi::kSuccess) return;
    const char* text = nullptr;
    const bool is_known = get_result_string(result, &text) == abi::kSuccess && text != nullptr;
    throw std::runtime_error(std::string(call) + ": " + (is_known ? text : std::to_string(result)));
}

}  // namespace nvrx
