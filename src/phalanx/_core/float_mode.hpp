// How this thread treats denormal numbers: a call that another thread carries out must give the caller's results.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace phalanx {

class FloatMode {
 public:
  // That of the thread which makes it.
  FloatMode() noexcept : bits_(read()) {}

  // Puts the mode into force for as long as it lives.
  class Scope {
   public:
    explicit Scope(const FloatMode& mode) noexcept : before_(read()), changed_(before_ != mode.bits_) {
      if (changed_) write(mode.bits_);
    }
    ~Scope() {
      if (changed_) write(before_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::uint64_t before_;
    const bool changed_;
  };

 private:
#if defined(__x86_64__)
  // All but the sticky exception flags, which say what happened and not how to compute.
  static std::uint64_t read() noexcept { return _mm_getcsr() & ~0x3fu; }
  static void write(std::uint64_t bits) noexcept { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
  static std::uint64_t read() noexcept {
    std::uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void write(std::uint64_t bits) noexcept { asm volatile("msr fpcr, %0" ::"r"(bits)); }
#else
  static std::uint64_t read() noexcept { return 0; }
  static void write(std::uint64_t) noexcept {}
#endif

  std::uint64_t bits_;
};

}  // namespace phalanx
