// libcupti, opened when it is wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "abi.h"

namespace nvrx {

// Its functions; what a version lacks and can be done without is nullptr.
struct Library {
    // Throws std::runtime_error, which says what is wrong with it.
    explicit Library(const std::string& path);

    std::string path;
    std::uint32_t version = 0;

    int (*get_version)(std::uint32_t*);
    int (*get_result_string)(int, const char**);
    int (*get_timestamp)(std::uint64_t*);
    int (*subscribe)(void**, void*, void*);
    int (*unsubscribe)(void*);
    int (*register_callbacks)(abi::RequestBuffer, abi::BufferComplete);
    int (*register_timestamp)(abi::Timestamp);  // since CUDA 11.6
    int (*enable)(std::uint32_t);
    int (*disable)(std::uint32_t);
    int (*enable_runtime_call)(std::uint32_t, std::uint8_t);  // since CUDA 12
    int (*enable_driver_call)(std::uint32_t, std::uint8_t);
    int (*flush_all)(std::uint32_t);
    int (*next_record)(std::uint8_t*, std::size_t, const abi::Record**);
    int (*dropped_records)(void*, std::uint32_t, std::size_t*);
    int (*push_external)(std::uint32_t, std::uint64_t);
    int (*pop_external)(std::uint32_t, std::uint64_t*);

    // Throws std::runtime_error unless `result` is success.
    void check(int result, const char* call) const;
};

}  // namespace nvrx
