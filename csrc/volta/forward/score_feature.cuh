// Interface of the score features of volta forward kernels that are compiled for a fixed set of features (feature_*.cuh):
// a score function, ALiBi, bias or dropout alone, ALiBi after a score function, or bias with dropout. "Product" below is q . k.
//
// A score function (softcap) maps a product to a state, and score = factor * state + constant. So the softmax can take states.
//
// The main loops of register_q.cuh and shared_q.cuh call the functions of ScoreFeature at fixed points; a feature overrides some.
// Generic kernels test parameters in every step (Scores::apply_score_mod). Here the features are known: terms that are added to
// scores become initial accumulators of the first product, and lanes keep from one tile of keys to the next what they would
// otherwise compute again. kVarlen, kPaged, kGeneric, kHas... and kRequires... are what the kernel is compiled for (features.cuh).
#pragma once

#include "batch_invariant.cuh"
#include "volta/forward/layout.cuh"

namespace volta {

static_assert(!kRequiredFeatures || (!kVarlen && !kHasFp32Bias), "no such kernel has registers for lengths or an fp32 bias");
// Whether a block's first key is rounded down to a multiple of 16: bias and random numbers come in groups of 4 keys, pages of 16.
constexpr bool kRoundedKeys = kPaged || kGeneric || kRequiresBias || kRequiresDropout;

// Shared memory of a lane, for what has no register: 16-byte chunks, `between` bytes apart, from shared address `first` on.
struct LaneScratch {
    u32 first = 0;
    int between = 0;
    __device__ __forceinline__ void store(int i, const uint4& x) const { store_shared(first + i * between, x); }
    __device__ __forceinline__ uint4 load(int i) const { return load_shared(first + i * between); }
};

// The interface, in the order of calls. This primary template, without a feature, does what plain kernels need. Arguments `int,
// int` are row and key, the first of the warp's tile of scores (init_row_max: row; draw: its 16 keys' first; drop: row tile and u).
// Each comment says which features override the function, and what theirs does. Feature: kFeature* bits (features.cuh). Grid: the
// kernel's grid policy (layout.cuh), which has a block's head and batch entry. RowTiles, KeyTiles: the warp's tiles of 16 query
// rows, and of 16 keys a step.
template <int RowTiles, int KeyTiles, unsigned Feature, class Grid>
class ScoreFeature {
    static_assert(Feature == 0, "no code for this combination of features");

public:
    using Tile = Scores<ForwardLayout, RowTiles, KeyTiles>;  // a lane's scores of a step (forward/scores.cuh)
    using Unmasked = UnmaskedKeys<16 * KeyTiles>;  // the range of tiles that need no mask (mask.cuh)
    struct Numbers {};  // random numbers of 16 keys, for dropout
    static constexpr int kLaneScratchChunks = 0;  // chunks of LaneScratch that it needs (bias, dropout: with one tile of keys)

    // May shorten the range of tiles that need no mask. ALiBi: ends it at the diagonal, where its terms change their sign.
    __device__ __forceinline__ ScoreFeature(const FwdParams&, const Grid&, const Mask&, Unmasked&, const LaneScratch&, int, int) {}
    // Returns the factor of scores in the softmax. Score function: its factor, because the softmax takes its states. ALiBi after
    // one: 1, because scores are already times log2(e). So are those of generic kernels, which use this primary template too.
    __device__ __forceinline__ float scale(const FwdParams& p) const { return kGeneric ? 1.f : p.problem.scale_log2; }
    // Sets initial row maxima. ALiBi: to the score of each row's nearest visible key, which it computes from `q` and `k`, the
    // sequence's first rows. Lazy maxima that began lower would rescale the output in several of the first tiles.
    __device__ __forceinline__ void init_row_max(SoftmaxState<RowTiles>&, const FwdParams&, const Mask&, const unsigned short*,
                                                 const unsigned short*, int) const {}
    // Loads what a tile needs before its product, which hides the latency (bias).
    __device__ __forceinline__ void load(const FwdParams&, int, int) {}
    // init_accumulators sets the initial accumulators of a tile's product; add_to then adds terms to the product. ALiBi and bias
    // begin with their terms. ALiBi after a score function adds its terms to the function's value, and bias with several tiles of
    // keys has no registers for them during the product.
    __device__ __forceinline__ void init_accumulators(const FwdParams&, Tile& s, int, int) { s.clear(); }
    __device__ __forceinline__ void add_to(const FwdParams&, Tile&) {}
    // Corrects a tile that needs a mask, before the mask. ALiBi: the sign of terms after the diagonal. kCorrectionRaises: whether
    // that may raise scores, so that a test of them against row maxima has to be made again where correction_raises(p).
    static constexpr bool kCorrectionRaises = false;
    __device__ __forceinline__ void correct_masked_tile(Tile&, SoftmaxState<RowTiles>&, Unmasked&, const FwdParams&, const Mask&,
                                                        int, int) {}
    // Raises row maxima and calls rescale(row tile, row, factor), which rescales the output. kMovedRows: all rows, in
    // batch-invariant kernels those above their limit. Score function: converts maxima of products to those of states.
    template <class Rescale>
    __device__ __forceinline__ void update_row_max(const Tile& s, SoftmaxState<RowTiles>& softmax, float scale, float inverse_scale,
                                                   Rescale rescale) const {
        s.template update_row_max<kMovedRows>(softmax, scale, inverse_scale, rescale);
    }
    // Prepares the tile for score(), after the mask and the row maxima; `masked`: the tile was masked. Score function:
    // makes the states of masked scores infinite, so that their probabilities are 0.
    __device__ __forceinline__ void set_masked(bool, Tile&) {}
    // Returns what the softmax takes as the score. Score function: the state of x.
    __device__ __forceinline__ float score(float x) const { return x; }
    // Dropout: draw() draws numbers for 16 keys. drop() clears packed probabilities: its words are elements 4u to 4u + 3 of a tile;
    // u (0 or 1) is the product O += P V that takes them.
    __device__ __forceinline__ void draw(Numbers&, const FwdParams&, int, int) const {}
    __device__ __forceinline__ void drop(u32&, u32&, const Numbers&, const FwdParams&, int, int) const {}
    // Turns row maxima into those of the scores that the lse counts, after the last step. Score function: adds the constant, which
    // states leave out. ALiBi: initial accumulators have slope * j alone; subtracts slope * (i + o), constant in a row. The float
    // is scale().
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>&, float) const {}
};

}  // namespace volta
