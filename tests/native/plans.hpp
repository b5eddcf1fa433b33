// Random calls, the same on every rank: what all agree on, and one rank's side of it in random memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness.hpp"
#include "payload.hpp"

namespace stress {

// What all ranks agree on. `counts` has the elements of each block; all_to_all has size * size of them, sender first.
struct Plan {
  Op op;
  int root;
  Contents contents;
  std::vector<std::uint64_t> counts;

  std::string describe() const;
};

// Call number `index` of the world with this seed.
Plan random_plan(std::uint64_t seed, std::uint64_t index, int size, const Tuning& tuning, Mixture mixture);

// One rank's side of a plan, which must outlive it: its memory, and what must be in it afterwards.
class Side {
 public:
  Side(const Plan& plan, int rank, Random& random);
  void fill(Request& request) const;
  void check(Complaints& complaints) const;

 private:
  std::vector<std::uint64_t> counts_in() const;
  std::vector<std::uint64_t> counts_out() const;
  std::uint64_t sent(int from, int to) const;
  Bytes input(std::size_t block) const;
  Bytes output(std::size_t block) const;
  void compare(const char* side, std::size_t block, const Bytes& found, const Bytes& expected,
               Complaints& complaints) const;

  const Plan& plan_;
  int rank_;
  std::size_t own_;
  bool is_root_;
  bool in_place_;
  Memory in_;
  Memory out_;
};

}  // namespace stress
