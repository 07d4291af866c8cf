// What a main kernel of the backward pass does with dq.
#pragma once

enum class DqMode {
    kSeparate,  // another kernel computes them
    kAtomicAdd,     // to their accumulator, by atomics
    // Stored, since the block has all keys of its heads. Then it is the whole backward pass: it makes the statistics of its rows
    // before it begins with a head, and walks over all rows of queries, since those that see no key have a gradient too, 0.
    kStore,
};
