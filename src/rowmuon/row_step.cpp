// The row step of many matrices in one pass over memory: read g, m and w, write m and w.
//
//     M <- M + mix (G - M)
//     U  = M + share (G - M)
//     W_i <- keep W_i - step U_i / max(||U_i||, floor)
//
// A weight can't be touched before the last column of its row is summed, and memory is fastest while all streams run.
// Short rows take one loop for the sums and another for the weights: the processor looks far enough ahead to have the
// next loop's stream under way. Long rows are staggered: one loop takes row i through the momentum and writes U_i to a
// buffer, from which it has just stepped row i - 1 of the weights.
//
// Compiled by `rowmuon.native` for one combination of dtypes: WEIGHT, MOMENTUM and GRAD are float, double or bf16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
    bf16() = default;
    explicit bf16(float value) {  // to nearest, ties to even, as torch does
        uint32_t word;
        std::memcpy(&word, &value, sizeof word);
        uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
        bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
    }
    explicit bf16(double value) : bf16(static_cast<float>(value)) {}
    operator float() const {
        uint32_t word = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &word, sizeof value);
        return value;
    }
};

// fp32 unless something is fp64.
template <class A, class B, class C>
using widest = decltype(float() + A(0.f) + B(0.f) + C(0.f));
using Work = widest<WEIGHT, MOMENTUM, GRAD>;

struct Settings {
    Work sign;   // of the gradient: -1 to maximise
    Work mix;    // share of the gradient in the momentum
    Work share;  // further share of it in the direction
    Work keep;   // what the decay leaves of the weight
    Work floor;  // least norm that is divided by
};

inline Work direction(Work& momentum, Work grad, const Settings& s) {
    momentum += s.mix * (grad - momentum);
    return momentum + s.share * (grad - momentum);
}

// U and the momentum of one row; the sum of squares of U.
Work sum_row(MOMENTUM* __restrict m, const GRAD* __restrict g, Work* __restrict u, int64_t n, const Settings& s) {
    Work sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++) {
        Work momentum = Work(m[c]);
        Work d = direction(momentum, s.sign * Work(g[c]), s);
        m[c] = MOMENTUM(momentum);
        u[c] = d;
        sum += d * d;
    }
    return sum;
}

// The same, and the step of the row above it, whose direction is in `u` until this one's takes its place.
Work step_row_and_sum(WEIGHT* __restrict w, MOMENTUM* __restrict m, const GRAD* __restrict g, Work* __restrict u,
                      int64_t n, Work factor, const Settings& s) {
    Work sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++) {
        w[c] = WEIGHT(s.keep * Work(w[c]) - factor * u[c]);
        Work momentum = Work(m[c]);
        Work d = direction(momentum, s.sign * Work(g[c]), s);
        m[c] = MOMENTUM(momentum);
        u[c] = d;
        sum += d * d;
    }
    return sum;
}

void step_row(WEIGHT* __restrict w, const Work* __restrict u, int64_t n, Work factor, const Settings& s) {
#pragma omp simd
    for (int64_t c = 0; c < n; c++) w[c] = WEIGHT(s.keep * Work(w[c]) - factor * u[c]);
}

Work factor_of(Work sum, Work step, const Settings& s) {
    Work norm = std::sqrt(sum);
    return step / (norm < s.floor ? s.floor : norm);  // a norm that isn't a number stays one
}

// Bytes of a row in all three: half of a level 1 data cache of 48 KiB. Measured: docs/bench.md.
constexpr int64_t short_row_bytes = 24 << 10;

void step_rows(WEIGHT* w, MOMENTUM* m, const GRAD* g, Work* u, int64_t num_rows, int64_t n, Work step,
               const Settings& s) {
    if (num_rows <= 0) return;
    Work factor = factor_of(sum_row(m, g, u, n, s), step, s);
    const bool is_short = n * int64_t(sizeof *w + sizeof *m + sizeof *g) <= short_row_bytes;
    for (int64_t i = 1; i < num_rows; i++, w += n) {
        m += n;
        g += n;
        if (is_short) {
            step_row(w, u, n, factor, s);
            factor = factor_of(sum_row(m, g, u, n, s), step, s);
        } else {
            factor = factor_of(step_row_and_sum(w, m, g, u, n, factor, s), step, s);
        }
    }
    step_row(w, u, n, factor, s);
}

}  // namespace

struct Matrix {
    WEIGHT* weight;  // (num_rows, num_cols), as the others
    MOMENTUM* momentum;
    const GRAD* grad;
    int64_t num_rows;
    int64_t num_cols;
};

// Weights of parameters that are views of one tensor. They are stepped one after another, by one thread.
static bool share_memory(const Matrix* matrices, int64_t num_matrices) {
    std::vector<std::pair<const WEIGHT*, const WEIGHT*>> spans;
    spans.reserve(num_matrices);
    for (const Matrix* a = matrices; a < matrices + num_matrices; a++)
        spans.emplace_back(a->weight, a->weight + a->num_rows * a->num_cols);
    std::sort(spans.begin(), spans.end());
    for (size_t k = 1; k < spans.size(); k++)
        if (spans[k].first < spans[k - 1].second) return true;
    return false;
}

// Each thread takes its part of the rows of every matrix. `steps`: lr * scale of each matrix.
extern "C" void row_steps(const Matrix* matrices, const double* steps, int64_t num_matrices, double sign, double mix,
                          double share, double keep, double floor, int64_t num_threads) {
    const Settings s{Work(sign), Work(mix), Work(share), Work(keep), Work(floor)};
    int64_t longest = 0;
    for (int64_t k = 0; k < num_matrices; k++) longest = std::max(longest, matrices[k].num_cols);
    if (num_threads > 1 && share_memory(matrices, num_matrices)) num_threads = 1;
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
        int64_t thread = 0, count = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num();
        count = omp_get_num_threads();
#endif
        std::unique_ptr<Work[]> buffer(new Work[longest + 64 / sizeof(Work)]);
        auto address = (reinterpret_cast<uintptr_t>(buffer.get()) + 63) & ~uintptr_t(63);  // one line a vector
        Work* u = reinterpret_cast<Work*>(address);
        for (int64_t k = 0; k < num_matrices; k++) {
            const Matrix& a = matrices[k];
            const int64_t first = a.num_rows * thread / count, last = a.num_rows * (thread + 1) / count;
            const int64_t start = first * a.num_cols;
            step_rows(a.weight + start, a.momentum + start, a.grad + start, u, last - first, a.num_cols,
                      Work(steps[k]), s);
        }
    }
}
