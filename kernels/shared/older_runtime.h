// Lets libraries that are compiled ahead run with the C++ runtime of GCC 8: GCC 11 and newer call a function
// that this runtime does not have. Included before everything else.
#include <new>

namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std
