//! The command volta-sim: simulates one launch of a kernel in an sm_70 or sm_75 cubin, functionally, timed or both. A JSON file names
//! cubin, kernel, grid, parameters and buffers. Prints a report; `--json` writes it as data. README.md has examples and explains the
//! report.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use volta_sim::{run_job, Dispatch, Error, JobOptions, KernelInfo, Machine, Module, Report, Result, Schedule, TimingOptions};

const USAGE: &str = "usage: volta-sim LAUNCH.json [options]
       volta-sim --list CUBIN
  --functional-only    run every CTA, no timing
  --timing             time one SM's share only (outputs are then incomplete)
                       (default: timing on scratch memory, then the full functional run)
  --ctas N             simulate only the first N CTAs of that SM and extrapolate
  --static             round-robin CTA assignment (default: dynamic dispatch estimate)
  --sm N               time this SM (default: the one with the most work)
  --threads N          host threads of the functional run (default: all)
  --quantum N          warp switch interval of the functional run (default 20000: warps run from
                       barrier to barrier, which exposes races; try 1 to see a benign schedule)
  --gpu NAME           the GPU that is timed: v100 (default) or pg503 for sm_70; t4, rtx2080ti or titanrtx for sm_75
  --set NAME=VALUE     override a machine constant (src/machine.rs)
  --json FILE|-        write the report as JSON
  --annotate FILE      write the listing with execution counts, waits and bank conflicts";

enum Command {
    Help,
    List(PathBuf),
    Run(Box<Run>),
}

struct Run {
    launch: PathBuf,
    options: JobOptions,
    json: Option<String>,
    annotate: Option<String>,
}

fn parse_args(mut args: impl Iterator<Item = String>) -> Result<Command> {
    let (mut schedule, mut timing) = (Schedule::default(), TimingOptions::default());
    let (mut functional_only, mut timing_only) = (false, false);
    let (mut launch, mut json, mut annotate) = (None, None, None);
    let mut settings: Vec<(String, String)> = vec![];
    while let Some(a) = args.next() {
        let mut val = || args.next().ok_or_else(|| Error::from(format!("{a} needs a value")));
        let number = |v: String| v.parse::<u32>().map_err(|_| Error::from(format!("{a} N")));
        match a.as_str() {
            "--functional-only" => functional_only = true,
            "--timing" => timing_only = true,
            "--static" => timing.dispatch = Dispatch::Static,
            "--ctas" => timing.ctas = Some(number(val()?)? as usize),
            "--sm" => timing.sm = Some(number(val()?)?),
            "--threads" => schedule.threads = number(val()?)? as usize,
            "--quantum" => schedule.quantum = number(val()?)?,
            "--json" => json = Some(val()?),
            "--annotate" => annotate = Some(val()?),
            "--list" => return Ok(Command::List(val()?.into())),
            "--gpu" => {
                let name = val()?;
                let known = || Error::from(format!("--gpu {name}: known are {}", Machine::names().join(", ")));
                timing.machine = Machine::named(&name).ok_or_else(known)?;
            }
            "--set" => {
                let kv = val()?;
                let (name, value) = kv.split_once('=').ok_or_else(|| Error::from("--set NAME=VALUE".to_string()))?;
                settings.push((name.to_string(), value.to_string()));
            }
            "-h" | "--help" => return Ok(Command::Help),
            _ if a.starts_with("--") => return Err(format!("unknown option {a}\n{USAGE}").into()),
            _ => launch = Some(PathBuf::from(a)),
        }
    }
    if functional_only && timing_only {
        let e = "--timing: got it beside --functional-only, expected one of the two: without either, both runs are made";
        return Err(e.to_string().into());
    }
    for (name, value) in &settings {
        timing.machine.set(name, value).map_err(|e| Error::from(format!("--set: got {name}={value}, expected {e}")))?;
    }
    timing.annotate = annotate.is_some();
    let options = JobOptions { timing: (!functional_only).then_some(timing), functional: (!timing_only).then_some(schedule) };
    let launch = launch.ok_or_else(|| Error::from(USAGE.to_string()))?;
    Ok(Command::Run(Box::new(Run { launch, options, json, annotate })))
}

fn list(path: &Path) -> Result<()> {
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let module = Module::load(&bytes)?;
    for name in module.kernel_names() {
        let KernelInfo { registers, static_smem, params, frame_bytes, spill_insts, code_bytes, undecoded, .. } =
            module.kernel_info(name)?;
        let sizes: Vec<u32> = params.iter().map(|p| p.size).collect();
        print!("{name}: {registers} registers, {static_smem} B static shared, {frame_bytes} B frame, ");
        println!("{spill_insts} local-memory instructions, {code_bytes} B code, parameters of {sizes:?} bytes");
        for why in undecoded {
            println!("  {why}");
        }
    }
    Ok(())
}

fn write(path: &str, text: &str) -> Result<()> {
    Ok(std::fs::write(path, text).map_err(|e| format!("{path}: {e}"))?)
}

fn to_json(report: &Report) -> Result<String> {
    Ok(serde_json::to_string_pretty(report).map_err(|e| e.to_string())?)
}

fn run(r: &Run) -> Result<()> {
    let mut report = run_job(&r.launch, &r.options)?;
    let listing = report.timing.as_mut().and_then(|t| t.listing.take());
    if let (Some(f), Some(listing)) = (&r.annotate, listing) {
        write(f, &listing)?;
    }
    match r.json.as_deref() {
        Some("-") => println!("{}", to_json(&report)?),
        Some(f) => {
            write(f, &to_json(&report)?)?;
            print!("{report}");
        }
        None => print!("{report}"),
    }
    Ok(())
}

fn main() -> ExitCode {
    let done = parse_args(std::env::args().skip(1)).and_then(|command| match command {
        Command::Help => {
            println!("{USAGE}");
            Ok(())
        }
        Command::List(path) => list(&path),
        Command::Run(r) => run(&r),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("volta-sim: error: {e}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_timing_beside_functional_only() {
        let parsed = |flags: &[&str]| parse_args(["launch.json"].iter().chain(flags).map(|arg| arg.to_string())).map(|_| ());
        assert!(parsed(&["--functional-only"]).is_ok() && parsed(&["--timing"]).is_ok());
        assert!(parsed(&["--timing", "--functional-only"]).is_err_and(|e| e.to_string().contains("--functional-only")));
    }
}
