// Defines symbols that g++ refers to and that older C and C++ libraries lack. tools/portable_linker.py links them into each shim, so
// that the wheel loads there. They are hidden, so no other library sees them.

#include <new>

// glibc 2.32: false has std::shared_ptr count atomically, as it would in a process that may have threads.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace std {

// libstdc++ of gcc 11 (GLIBCXX_3.4.29)
__attribute__((visibility("hidden"), noreturn)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
