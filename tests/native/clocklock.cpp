// gcc 12's thread sanitizer does not intercept pthread_mutex_clocklock, which std::timed_mutex::try_lock_until calls:
// it would take every unlock for one of an unlocked mutex, and not see that the mutex orders anything. Here the same
// lock is taken through pthread_mutex_timedlock, which it does intercept.
#if defined(__SANITIZE_THREAD__)

#include <pthread.h>

#include <cerrno>
#include <ctime>

extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) noexcept {
  constexpr long kSecond = 1'000'000'000;
  timespec now, until_realtime;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until_realtime);
  if (until->tv_sec < now.tv_sec) return pthread_mutex_trylock(mutex) == 0 ? 0 : ETIMEDOUT;
  until_realtime.tv_sec += until->tv_sec - now.tv_sec;
  until_realtime.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (until_realtime.tv_nsec < 0) {
    until_realtime.tv_nsec += kSecond;
    --until_realtime.tv_sec;
  } else if (until_realtime.tv_nsec >= kSecond) {
    until_realtime.tv_nsec -= kSecond;
    ++until_realtime.tv_sec;
  }
  return pthread_mutex_timedlock(mutex, &until_realtime);
}

#endif
