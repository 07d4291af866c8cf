//! Reads of the special registers (S2R, CS2R): indices of thread and CTA, lane masks, clocks. `d` decodes an instruction and `s` executes
//! it: `s.write` writes its result in the active lanes.

use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::operand::{look_up, Operand};
use crate::step::{Class, SimResult, Step};

fn by_name(n: &str) -> Option<SReg> {
    use SReg::*;
    #[rustfmt::skip]
    let known = [
        ("SR_TID.X", Tid(0)), ("SR_TID.Y", Tid(1)), ("SR_TID.Z", Tid(2)),
        ("SR_CTAID.X", Ctaid(0)), ("SR_CTAID.Y", Ctaid(1)), ("SR_CTAID.Z", Ctaid(2)),
        ("SR_NCTAID.X", NCtaId(0)), ("SR_NCTAID.Y", NCtaId(1)), ("SR_NCTAID.Z", NCtaId(2)),
        ("SR_LANEID", LaneId), ("SR_WARPID", WarpId), ("SR_VIRTID", WarpId), ("SR_SMID", SmId), ("SR_VIRTUALSMID", SmId), ("SRZ", Zero),
        ("SR_CLOCKLO", Clock), ("SR_CLOCKHI", ClockHi), ("SR_GLOBALTIMERLO", GlobalTimer),
        ("SR_EQMASK", EqMask), ("SR_LTMASK", LtMask), ("SR_LEMASK", LeMask), ("SR_GTMASK", GtMask), ("SR_GEMASK", GeMask),
    ];
    look_up(&known, n)
}

impl Class for SpecialRegister {
    fn decode(d: &mut Decoder) -> Decoded {
        if d.base != "S2R" && d.base != "CS2R" {
            return Ok(None);
        }
        d.dst()?;
        let sreg = match d.next() {
            Some(Operand::Name(n)) => by_name(&n),
            _ => None,
        };
        let sreg = sreg.ok_or_else(|| d.fail("special register"))?;
        Ok(Some(Op::SpecialRegister(if d.base == "S2R" {
            d.inst.unit = Unit::Lsu; // S2R goes through the memory queue, and has a scoreboard
            SpecialRegister::S2r(sreg)
        } else {
            SpecialRegister::Cs2r { sreg, wide: !d.has("32") }
        })))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            SpecialRegister::S2r(sreg) => s.write(&value(sreg, s)),
            // `wide`: into a register pair, high word 0 but for the clock
            SpecialRegister::Cs2r { sreg, wide } => {
                s.write(&value(sreg, s));
                if wide && s.inst.dst != RZ {
                    let hi = if sreg == SReg::Clock { [(s.now >> 32) as u32; 32] } else { [0; 32] };
                    s.warp.write(s.inst.dst + 1, &hi, s.active);
                }
            }
        }
        Ok(())
    }
}

#[inline(always)]
fn value(sreg: SReg, s: &Step) -> V {
    let tid = |l: usize| s.warp.index * 32 + l as u32;
    let (bx, by) = (s.env.block[0], s.env.block[1]);
    match sreg {
        SReg::Tid(0) => lanes(|l| tid(l) % bx),
        SReg::Tid(1) => lanes(|l| tid(l) / bx % by),
        SReg::Tid(_) => lanes(|l| tid(l) / bx / by),
        SReg::Ctaid(i) => [s.cta[i as usize]; 32],
        SReg::NCtaId(i) => [s.env.grid[i as usize]; 32],
        SReg::LaneId => lanes(|l| l as u32),
        SReg::WarpId => [s.warp.index; 32],
        // the timer has no unit of its own here: it counts cycles
        SReg::Clock | SReg::GlobalTimer => [s.now as u32; 32],
        SReg::ClockHi => [(s.now >> 32) as u32; 32],
        SReg::EqMask => lanes(|l| 1 << l),
        SReg::LtMask => lanes(|l| (1u32 << l) - 1),
        // 64 bits, because lane 31 shifts by 32
        SReg::LeMask => lanes(|l| ((2u64 << l) - 1) as u32),
        SReg::GtMask => lanes(|l| !((2u64 << l) - 1) as u32),
        SReg::GeMask => lanes(|l| !((1u32 << l) - 1)),
        SReg::Zero | SReg::SmId => [0; 32], // one SM is simulated
    }
}
