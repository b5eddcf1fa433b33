#include "plans.hpp"

#include <algorithm>

namespace stress {

namespace {

constexpr std::uint64_t kLargestBytes = 24 * 1024;
// Calls in a row that may keep their op and root, so that a rank that waits for nobody gets far ahead.
constexpr std::uint64_t kRun = 8;

constexpr const char* kOpNames[] = {"barrier", "all_reduce", "reduce",         "broadcast", "all_gather",
                                    "gather",  "scatter",    "reduce_scatter", "all_to_all"};

bool reduces(Op op) { return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter; }

bool has_root(Op op) { return op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter; }

std::uint64_t random_count(Random& random, const Tuning& tuning, std::size_t element_size, std::uint64_t parts) {
  const auto near = [&](std::uint64_t bytes) {
    const std::uint64_t count = bytes / element_size + random.below(3);
    return count == 0 ? 0 : count - 1;
  };
  switch (random.below(8)) {
    case 0:
      return 0;
    case 1:
      return 1;
    case 2:
    case 3:
      return 1 + random.below(40);
    case 4:
      return near(tuning.one_shot_bytes);
    case 5:
      return near(tuning.chunk_bytes / parts * random.below(5));
    default:
      return random.below(kLargestBytes / parts / element_size);
  }
}

}  // namespace

std::string Plan::describe() const {
  return text("%s dtype %d reduce_op %d root %d counts[0] %llu", kOpNames[static_cast<int>(op)],
              static_cast<int>(contents.dtype), contents.reduce_op, root,
              counts.empty() ? 0ull : static_cast<unsigned long long>(counts[0]));
}

Plan random_plan(std::uint64_t seed, std::uint64_t index, int size, const Tuning& tuning, Mixture mixture) {
  Random random(mix(seed, index));
  Random run(mix(seed, ~(index / kRun)));
  Random& chooser = run.one_in(3) ? run : random;
  Plan plan;
  const bool reductions = mixture == Mixture::long_reductions;
  plan.op = reductions ? chooser.pick({Op::all_reduce, Op::reduce, Op::reduce_scatter})
                       : static_cast<Op>(chooser.below(std::size(kOpNames)));
  plan.root = has_root(plan.op) ? static_cast<int>(chooser.below(static_cast<std::uint64_t>(size))) : -1;
  plan.contents = {random.next(), random.pick(kReducedDTypes), -1, size};
  if (reduces(plan.op)) {
    do {
      plan.contents.reduce_op = static_cast<int>(random.below(kNumReduceOps));
    } while (reduce_kernel(plan.contents.dtype, static_cast<ReduceOp>(plan.contents.reduce_op)) == nullptr);
  } else if (random.one_in(4)) {
    plan.contents.dtype = DType::none;
  }
  const bool one_block = plan.op == Op::all_reduce || plan.op == Op::reduce || plan.op == Op::broadcast;
  const bool may_differ = plan.op == Op::all_gather || plan.op == Op::reduce_scatter || plan.op == Op::all_to_all;
  const auto parts = static_cast<std::uint64_t>(one_block ? 1 : size);
  const auto count = [&] {
    const std::size_t width = element_size(plan.contents.dtype);
    const std::uint64_t longest = kLargestBytes / parts / width;
    return reductions ? longest - random.below(longest / 4) : random_count(random, tuning, width, parts);
  };
  if (plan.op == Op::barrier) return plan;
  plan.counts.assign(plan.op == Op::all_to_all ? parts * parts : parts, count());
  if (may_differ && random.one_in(2)) std::generate(plan.counts.begin(), plan.counts.end(), count);
  return plan;
}

Side::Side(const Plan& plan, int rank, Random& random)
    : plan_(plan), rank_(rank), own_(static_cast<std::size_t>(rank)), is_root_(plan.root == rank) {
  const std::size_t width = element_size(plan.contents.dtype);
  const std::vector<std::uint64_t> reads = counts_in(), writes = counts_out();
  in_place_ = !reads.empty() && !writes.empty() && plan.op != Op::all_to_all && random.one_in(2);
  if (in_place_ && writes.size() > reads.size()) {
    out_ = Memory(writes, width, random);
    in_ = Memory::part(out_, own_);
  } else if (in_place_) {
    in_ = Memory(reads, width, random);
    out_ = Memory::part(in_, reads.size() > writes.size() ? own_ : 0);
  } else if (plan.op == Op::reduce && !writes.empty()) {
    // A reduce's two sides are divided into pieces alike: it is in place wherever Python asks for it.
    Random same = random;
    in_ = Memory(reads, width, same);
    out_ = Memory(writes, width, random);
  } else {
    in_ = Memory(reads, width, random);
    out_ = Memory(writes, width, random);
  }
  for (std::size_t block = 0; block < in_.num_blocks(); ++block) in_.write(block, input(block));
}

void Side::fill(Request& request) const {
  request.op = plan_.op;
  request.reduce_op = plan_.contents.reduce_op;
  request.root = plan_.root;
  request.dtype = plan_.contents.dtype;
  request.count = plan_.op == Op::all_to_all || plan_.counts.empty() ? -1 : static_cast<std::int64_t>(plan_.counts[0]);
  request.layout = plan_.op == Op::all_to_all ? 0 : static_cast<std::uint32_t>(plan_.counts.size());
  request.factor = plan_.contents.factor(rank_);
  in_.describe(request.in);
  out_.describe(request.out);
}

void Side::check(Complaints& complaints) const {
  for (std::size_t block = 0; block < out_.num_blocks(); ++block) {
    compare("output", block, out_.read(block), output(block), complaints);
  }
  for (std::size_t block = 0; block < in_.num_blocks(); ++block) {
    const bool overwritten = in_place_ && reduces(plan_.op) && (in_.num_blocks() == 1 || block == own_);
    if (!overwritten) compare("input", block, in_.read(block), input(block), complaints);
  }
}

std::vector<std::uint64_t> Side::counts_in() const {
  switch (plan_.op) {
    case Op::all_gather:
    case Op::gather:
      return {plan_.counts[own_]};
    case Op::broadcast:
    case Op::scatter:
      return is_root_ ? plan_.counts : std::vector<std::uint64_t>{};
    case Op::all_to_all: {
      const auto first = plan_.counts.begin() + rank_ * plan_.contents.size;
      return {first, first + plan_.contents.size};
    }
    default:
      return plan_.counts;
  }
}

std::vector<std::uint64_t> Side::counts_out() const {
  switch (plan_.op) {
    case Op::reduce:
    case Op::gather:
      return is_root_ ? plan_.counts : std::vector<std::uint64_t>{};
    case Op::broadcast:
      return is_root_ ? std::vector<std::uint64_t>{} : plan_.counts;
    case Op::scatter:
    case Op::reduce_scatter:
      return {plan_.counts[own_]};
    case Op::all_to_all: {
      std::vector<std::uint64_t> counts;
      for (int peer = 0; peer < plan_.contents.size; ++peer) counts.push_back(sent(peer, rank_));
      return counts;
    }
    default:
      return plan_.counts;
  }
}

std::uint64_t Side::sent(int from, int to) const {
  return plan_.counts[static_cast<std::size_t>(from * plan_.contents.size + to)];
}

Bytes Side::input(std::size_t block) const {
  return plan_.contents.input(rank_, static_cast<int>(block), counts_in()[block]);
}

Bytes Side::output(std::size_t block) const {
  const int peer = static_cast<int>(block);
  switch (plan_.op) {
    case Op::all_reduce:
    case Op::reduce:
      return plan_.contents.reduced(0, plan_.counts[0]);
    case Op::reduce_scatter:
      return plan_.contents.reduced(rank_, plan_.counts[own_]);
    case Op::broadcast:
      return plan_.contents.input(plan_.root, 0, plan_.counts[0]);
    case Op::scatter:
      return plan_.contents.input(plan_.root, rank_, plan_.counts[own_]);
    case Op::all_to_all:
      return plan_.contents.input(peer, rank_, sent(peer, rank_));
    default:
      return plan_.contents.input(peer, 0, plan_.counts[block]);
  }
}

void Side::compare(const char* side, std::size_t block, const Bytes& found, const Bytes& expected,
                   Complaints& complaints) const {
  const auto [at, _] = std::mismatch(found.begin(), found.end(), expected.begin(), expected.end());
  if (at == found.end() && found.size() == expected.size()) return;
  complaints.push_back(text("%s: %s block %zu of %zu bytes (expected %zu) is wrong from byte %td",
                            plan_.describe().c_str(), side, block, found.size(), expected.size(), at - found.begin()));
}

}  // namespace stress
