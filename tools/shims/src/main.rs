//! Compiles and links the shims: for each release of torch one library, made of the C++ in `torch_ops/` alone.
//!
//! Kernels and Rust are in the core library, which cargo builds without torch and which all shims share.
//! `tools/build_shims.py` runs this program and copies the libraries into the package.

#[path = "../../build/progress.rs"]
mod progress;
mod step;
mod symbols;

use anyhow::{bail, Context, Result};
use progress::Progress;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use step::Step;

const USAGE: &str = "usage: volta-fa-shims --root FOLDER --core LIBRARY --headers FOLDER --out FOLDER [--linker PROGRAM] RELEASE=FOLDER...

root is the repository, LIBRARY is the core library, headers has volta_fa_abi.h and volta_fa_options.h,
each RELEASE=FOLDER names a torch package, as 2.11=/path/to/torch; the linker replaces the compiler for links.";

const SHIM: &str = "libvolta_fa.so";

/// The first release of torch with headers that need C++20.
const CXX20_SINCE: (u32, u32) = (2, 14);

struct Arguments {
    /// the repository, at run time: a checkout may move, or share its target folder with another
    root: PathBuf,
    core: PathBuf,
    headers: PathBuf,
    out: PathBuf,
    /// the program of tools/portable_linker.py, in a portable build
    linker: Option<PathBuf>,
    releases: Vec<Release>,
}

struct Release {
    /// as 2.11
    name: String,
    version: (u32, u32),
    /// the torch package, which has include/ and lib/
    torch: PathBuf,
}

impl Arguments {
    fn parse(mut given: impl Iterator<Item = OsString>) -> Result<Self> {
        let (mut root, mut core, mut headers, mut out, mut linker, mut releases) = (None, None, None, None, None, vec![]);
        while let Some(argument) = given.next() {
            let option = match argument.to_str() {
                Some("--root") => &mut root,
                Some("--core") => &mut core,
                Some("--headers") => &mut headers,
                Some("--out") => &mut out,
                Some("--linker") => &mut linker,
                _ => {
                    releases.push(Release::parse(&argument.to_string_lossy())?);
                    continue;
                }
            };
            *option = Some(PathBuf::from(given.next().context(USAGE)?));
        }
        let (Some(root), Some(core), Some(headers), Some(out)) = (root, core, headers, out) else { bail!(USAGE) };
        Ok(Arguments { root, core, headers, out, linker, releases })
    }
}

impl Release {
    fn parse(argument: &str) -> Result<Self> {
        let parts = || {
            let (name, torch) = argument.split_once('=')?;
            let (major, minor) = name.split_once('.')?;
            Some(Release { name: name.into(), version: (major.parse().ok()?, minor.parse().ok()?), torch: torch.into() })
        };
        match parts() {
            Some(release) if release.torch.join("include/torch/library.h").exists() => Ok(release),
            _ => bail!("got `{argument}`, expected <major>.<minor>=<folder> with include/torch/library.h in the folder\n{USAGE}"),
        }
    }

    /// Returns the compiler with all flags of this release.
    fn compiler(&self, headers: &Path, sources: &Path) -> Result<cc::Tool> {
        // cc reads these from the environment of build scripts
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut build = cc::Build::new();
        build.cargo_metadata(false).target(&target).host(&target).opt_level(2).debug(false);
        build.cpp(true).std(if self.version >= CXX20_SINCE { "c++20" } else { "c++17" });
        if std::env::var_os("CXX").is_none() {
            build.compiler("g++");
        }
        // The option list names parameters that not every registration reads.
        // g++ 12 warns wrongly about std::optional in templates of torch.
        for flag in ["-Wno-unused-parameter", "-Wno-maybe-uninitialized"] {
            build.flag(flag);
        }
        build.define("NDEBUG", None).define("_GLIBCXX_USE_CXX11_ABI", "1").include(headers).include(sources);
        for include in ["include", "include/torch/csrc/api/include"] {
            // no warnings about headers of torch
            build.flag("-isystem").flag(self.torch.join(include));
        }
        Ok(build.try_get_compiler()?)
    }
}

/// Returns the C++ files of a folder, sorted.
fn sources_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    let mut sources: Vec<PathBuf> =
        entries.into_iter().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|extension| extension == "cpp")).collect();
    sources.sort();
    Ok(sources)
}

/// Returns the step that links a shim.
fn link(arguments: &Arguments, release: &Release, compiler: &cc::Tool, objects: &[PathBuf], exports: &Path, shim: &Path) -> Step {
    let libraries = [arguments.core.clone(), release.torch.join("lib/libtorch_cpu.so"), release.torch.join("lib/libc10.so")];
    let mut command = match &arguments.linker {
        Some(linker) => Command::new(linker),
        None => compiler.to_command(),
    };
    command.arg("-shared").args(["-z,defs", "--gc-sections", "--strip-debug", "--enable-new-dtags"].map(|flag| format!("-Wl,{flag}")));
    command.arg(format!("-Wl,--version-script={}", exports.display()));
    command.args(std::env::var("LDFLAGS").unwrap_or_default().split_whitespace());
    command.arg(format!("-Wl,-soname,{SHIM}")).arg("-o").arg(shim).args(objects);
    // the core library is beside the folders of the releases
    command.arg("-Wl,-rpath,$ORIGIN/..").args(&libraries);
    if arguments.linker.is_some() {
        // the compiler adds these by itself
        command.args(["-lstdc++", "-lgcc_s"]);
    }
    let inputs = objects.iter().cloned().chain(libraries).chain([exports.to_path_buf()]).collect();
    Step { command, output: shim.to_path_buf(), inputs }
}

/// Runs each function on all CPUs. Returns the first error.
fn in_parallel<T: Sync>(items: &[T], run: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let worker = || -> Result<()> {
        while let Some(item) = items.get(next.fetch_add(1, Relaxed)) {
            // the others stop after their current item
            run(item).inspect_err(|_| next.store(items.len(), Relaxed))?;
        }
        Ok(())
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(items.len());
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        running.into_iter().map(|thread| thread.join().expect("a worker does not panic")).collect::<Vec<_>>().into_iter().collect()
    })
}

fn run() -> Result<()> {
    let arguments = Arguments::parse(std::env::args_os().skip(1))?;
    let root = &arguments.root;
    let mut sources = sources_in(&root.join("torch_ops"))?;
    if arguments.linker.is_some() {
        sources.push(root.join("tools/portable_symbols.cpp"));
    }

    std::fs::create_dir_all(&arguments.out)?;
    let needed = symbols::needed_from_shim(&arguments.core)?;
    let exports = arguments.out.join("exports.map");
    step::write_if_changed(&exports, &symbols::version_script(&needed))?;

    let (mut compiles, mut links) = (vec![], vec![]);
    for release in &arguments.releases {
        let compiler = release.compiler(&arguments.headers, &root.join("torch_ops"))?;
        let folder = arguments.out.join(format!("torch-{}", release.name));
        let shim = folder.join(SHIM);
        let objects: Vec<PathBuf> =
            sources.iter().map(|source| folder.join("objects").join(source.file_name().unwrap_or_default()).with_extension("o")).collect();
        for (source, object) in sources.iter().zip(&objects) {
            let mut command = compiler.to_command();
            command.arg("-MD").arg("-c").arg(source).arg("-o").arg(object);
            compiles.push(Step { command, output: object.clone(), inputs: vec![source.clone()] });
        }
        links.push(link(&arguments, release, &compiler, &objects, &exports, &shim));
    }
    compiles.retain(|step| !step.is_up_to_date());
    let progress = Progress::begin("C++ files", compiles.len(), std::io::stderr());
    in_parallel(&compiles, |step| step.bring_up_to_date().inspect(|()| progress.advance()))?;
    in_parallel(&links, Step::bring_up_to_date)?;
    // A function of tch that torch_ops/tch.cpp lacks fails the build here, and not the import of the library.
    links.iter().try_for_each(|link| symbols::check_exports(&link.output, &needed))
}

fn main() {
    if let Err(error) = run() {
        eprintln!("volta_fa: {error:#}");
        std::process::exit(1);
    }
}
