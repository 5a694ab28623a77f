// nvrx_slurm.checkpointing.async_ckpt._copying: copies of memory that leave the processor's caches to training.
//
// A store that goes past the caches (non-temporal) doesn't first read what it overwrites, so a copy moves two
// thirds of what memcpy moves, and evicts nothing that training will want. glibc's memcpy does so for single
// copies above three quarters of the last cache only; tensors are smaller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace py = pybind11;

namespace nvrx {

namespace {

// What one thread takes at a time: small beside what is copied, large beside the cost of taking it.
constexpr std::size_t kPiece = std::size_t{1} << 20;
// A vector of AVX-512, and a line of the cache: what a non-temporal store should fill as a whole.
constexpr std::size_t kLine = 64;

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void stream512(char* to, const char* from, std::size_t size) {
    for (std::size_t i = 0; i < size; i += kLine) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
}

void stream128(char* to, const char* from, std::size_t size) {
    for (std::size_t i = 0; i < size; i += sizeof(__m128i)) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
    }
}

void stream(char* to, const char* from, std::size_t size) {
    static const auto best = __builtin_cpu_supports("avx512f") ? stream512 : stream128;
    const std::size_t before = std::min(size, -reinterpret_cast<std::uintptr_t>(to) % kLine);
    const std::size_t lines = (size - before) / kLine * kLine;
    std::memcpy(to, from, before);
    best(to + before, from + before, lines);
    std::memcpy(to + before + lines, from + before + lines, size - before - lines);
    _mm_sfence();  // whoever is told that it is there sees it
}

#else

void stream(char* to, const char* from, std::size_t size) { std::memcpy(to, from, size); }

#endif

struct Piece {
    std::uintptr_t to;
    std::uintptr_t from;
    std::size_t size;
};

using Range = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>;

std::vector<Piece> cut(const std::vector<Range>& ranges) {
    std::vector<Piece> pieces;
    for (const auto& [to, from, size] : ranges) {
        for (std::size_t start = 0; start < size; start += kPiece) {
            pieces.push_back({to + start, from + start, std::min(kPiece, size - start)});
        }
    }
    return pieces;
}

void copy(const std::vector<Range>& ranges, int threads) {
    const std::vector<Piece> pieces = cut(ranges);
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i = next++; i < pieces.size(); i = next++) {
            stream(reinterpret_cast<char*>(pieces[i].to), reinterpret_cast<const char*>(pieces[i].from),
                   pieces[i].size);
        }
    };
    const std::size_t most = std::min<std::size_t>(std::max(threads, 1), std::max<std::size_t>(pieces.size(), 1));
    std::vector<std::thread> helpers;
    try {
        while (helpers.size() + 1 < most) {
            helpers.emplace_back(work);
        }
    } catch (const std::system_error&) {
        // No more threads: those that there are copy all of it.
    }
    work();
    for (std::thread& each : helpers) {
        each.join();
    }
}

}  // namespace

}  // namespace nvrx

PYBIND11_MODULE(_copying, module) {
    module.def("copy", &nvrx::copy, py::arg("ranges"), py::arg("threads") = 1,
               py::call_guard<py::gil_scoped_release>());
}
