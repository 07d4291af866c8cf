//! Tests of the simulator with the compiled kernels.
#![cfg(feature = "sim")]

use std::num::NonZero;
use std::thread::{available_parallelism, scope};
use volta_fa::kernels::{self, Variant, VOLTA};
use volta_sim::{KernelInfo, Machine, Module};

/// Decodes kernels on all cores and checks each.
fn check_decoded(kernels: impl Iterator<Item = &'static Variant>, check: impl Fn(&Variant, &KernelInfo) + Sync) {
    let (kernels, check) = (&kernels.collect::<Vec<_>>(), &check);
    let threads = available_parallelism().map_or(1, NonZero::get);
    scope(|scope| {
        for first in 0..threads {
            scope.spawn(move || {
                for v in kernels.iter().skip(first).step_by(threads) {
                    let module = Module::load(&kernels::image(v).cubin().unwrap()).unwrap_or_else(|e| panic!("{}: {e}", v.name));
                    check(v, module.kernel_info(v.name).unwrap());
                }
            });
        }
    });
}

/// Finds unknown instructions without running them.
fn assert_all_known(v: &Variant, info: &KernelInfo) {
    assert!(info.undecoded.is_empty(), "{}:\n{}", v.name, info.undecoded.join("\n"));
}

/// Other families than Volta, whose kernels the next test decodes.
#[test]
fn simulator_knows_every_instruction() {
    check_decoded(kernels::variants().filter(|v| v.family != VOLTA && Machine::of_sm(v.family.sm).is_some()), assert_all_known);
}

#[test]
fn kernels_are_known_and_reach_declared_occupancy_without_local_arrays() {
    check_decoded(kernels::variants().filter(|v| v.family == VOLTA), |v, info| {
        assert_all_known(v, info);
        assert_eq!(info.params.len(), 1, "{}", v.name);
        assert_eq!(info.params[0].size as usize, kernels::params_bytes(v.params()), "{}", v.name);
        // How much ptxas may spill is a rule of tests/kernels.rs. Arrays in local memory are no spills.
        let spills = kernels::image(v).spill_bytes > 0;
        assert!(spills || info.spill_insts == 0, "{}: {} local-memory instructions", v.name, info.spill_insts);
        assert_eq!(info.static_smem, 0, "{}: static shared memory, which the table does not count", v.name);
        let occupancy = Machine::default().occupancy(info.registers, v.shared_bytes, v.threads);
        assert!(occupancy.ctas >= v.blocks_per_sm, "{}: {} blocks an SM, {} declared", v.name, occupancy.ctas, v.blocks_per_sm);
    });
}

/// Machine descriptions and family tables agree about the hardware.
#[test]
fn machine_descriptions_match_families() {
    for name in Machine::names() {
        let machine = Machine::named(&name).unwrap();
        let family = kernels::COMPILED.families().find(|f| f.sm == machine.sm).unwrap();
        assert_eq!((machine.smem_per_sm, 32 * machine.max_warps), (family.shared_bytes, family.threads), "{name}");
        for v in kernels::variants().filter(|v| v.family.sm == machine.sm) {
            let resident = machine.occupancy(kernels::image(v).registers, v.shared_bytes, v.threads).ctas;
            assert!(resident >= v.blocks_per_sm, "{}: {resident} blocks on a {name}, {} in its table", v.name, v.blocks_per_sm);
        }
    }
}
