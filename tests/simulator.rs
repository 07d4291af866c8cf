//! Tests of the simulator with the compiled kernels.
#![cfg(feature = "sim")]

use volta_fa::kernels;
use volta_sim::{Machine, Module};

/// Finds unknown instructions without running them. The last kernel of each Volta pass suffices, because it has all features.
#[test]
fn simulator_knows_every_instruction() {
    let volta = kernels::PASSES.iter().filter_map(|p| kernels::COMPILED.of(&kernels::VOLTA, p.pass).last());
    let others = kernels::variants().filter(|v| v.family.sm != 70 && Machine::of_sm(v.family.sm).is_some());
    for v in volta.chain(others) {
        let module = Module::load(&kernels::image(v).cubin().unwrap()).unwrap_or_else(|e| panic!("{}: {e}", v.name));
        let undecoded = &module.kernel_info(v.name).unwrap().undecoded;
        assert!(undecoded.is_empty(), "{}:\n{}", v.name, undecoded.join("\n"));
    }
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
