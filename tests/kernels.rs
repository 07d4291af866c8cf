//! The embedded machine code keeps its promises: parameters, spills, occupancy.
#![cfg(feature = "sim")]

use volta_fa::kernels::{self, Pass};
use volta_fa::params::{BwdParams, FwdParams};
use volta_sim::{Machine, Module};

/// The parameter block has one definition: what Rust fills is what each kernel was compiled to read.
#[test]
fn parameter_blocks_agree() {
    for v in kernels::variants() {
        let module = Module::load(&kernels::image(v).cubin().unwrap()).unwrap();
        let info = module.kernel_info(v.name).unwrap();
        let expected = if v.pass == Pass::Forward { size_of::<FwdParams>() } else { size_of::<BwdParams>() };
        assert_eq!(info.params.len(), 1, "{}", v.name);
        assert_eq!(info.params[0].size as usize, expected, "{}", v.name);
    }
}

#[test]
fn no_spills_and_the_declared_occupancy() {
    for v in kernels::variants() {
        let image = kernels::image(v);
        let module = Module::load(&image.cubin().unwrap()).unwrap();
        let info = module.kernel_info(v.name).unwrap();
        assert_eq!(image.spill_bytes, 0, "{}: ptxas spilled", v.name);
        assert_eq!(info.spill_insts, 0, "{}: local-memory instructions", v.name);
        assert_eq!(image.registers, info.registers, "{}", v.name);
        assert_eq!(info.static_smem, 0, "{}: static shared memory, which the table does not count", v.name);
        let occupancy = Machine::default().occupancy(info.registers, v.shared_bytes, v.threads);
        assert!(occupancy.ctas >= v.blocks_per_sm, "{}: {} blocks an SM, {} declared", v.name, occupancy.ctas, v.blocks_per_sm);
    }
}

/// PTX is what newer GPUs run: it must name the virtual architecture of the family.
#[test]
fn ptx_is_for_the_family() {
    for v in kernels::variants() {
        let ptx = kernels::image(v).ptx().unwrap();
        assert_eq!(ptx.last(), Some(&0), "{}", v.name);
        let text = String::from_utf8_lossy(&ptx);
        assert!(text.contains(&format!(".target sm_{}", v.family.sm)) && text.contains(v.name), "{}", v.name);
    }
}
