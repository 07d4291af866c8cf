//! The simulator beside the kernels that it is built with.
#![cfg(feature = "sim")]

use volta_fa::kernels;
use volta_sim::{Machine, Module};

/// What the simulator does not know would otherwise show only where a problem comes to it. (Of Volta, whose instructions were met
/// long ago, a table's last row is enough: it covers every need.)
#[test]
fn every_instruction_is_known() {
    let tables = kernels::COMPILED.0.iter().filter(|table| Machine::of_sm(table[0].family.sm).is_some());
    for v in tables.flat_map(|table| if table[0].family.sm == 70 { &table[table.len() - 1..] } else { table }) {
        let module = Module::load(&kernels::image(v).cubin().unwrap()).unwrap_or_else(|e| panic!("{}: {e}", v.name));
        let undecoded = &module.kernel_info(v.name).unwrap().undecoded;
        assert!(undecoded.is_empty(), "{}:\n{}", v.name, undecoded.join("\n"));
    }
}

/// A description and a family's table say the same of the hardware.
#[test]
fn machines_are_what_families_are_made_for() {
    for name in Machine::names() {
        let machine = Machine::named(&name).unwrap();
        let family = kernels::COMPILED.families().find(|f| f.sm == machine.sm).unwrap();
        assert_eq!((machine.smem_per_sm, 32 * machine.max_warps), (family.shared_bytes, family.threads), "{name}");
        for v in kernels::variants().filter(|v| v.family.sm == machine.sm) {
            let resident = machine.occupancy(v.registers, v.shared_bytes, v.threads).ctas;
            assert!(resident >= v.blocks_per_sm, "{}: {resident} blocks on a {name}, {} in its table", v.name, v.blocks_per_sm);
        }
    }
}
