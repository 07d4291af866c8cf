//! What the active Python offers: torch, and NVRTC with its headers from the PyPI wheels.

use anyhow::{bail, Context, Result};
use std::path::PathBuf;
use std::process::Command;

/// The release that this version is made for.
const TORCH_VERSION: &str = "2.11.0";

const QUERY: &str = r"
import importlib.util, pathlib, sys
spec = importlib.util.find_spec('torch')
if spec is None:
    print('missing=torch'); sys.exit()
import torch
from torch.utils import cpp_extension
print('torch=' + torch.__version__)
print('torch_file=' + torch.version.__file__)
print('abi=' + str(int(torch._C._GLIBCXX_USE_CXX11_ABI)))
for d in cpp_extension.include_paths():
    print('torch_include=' + d)
for d in cpp_extension.library_paths():
    print('torch_lib=' + d)
for root in [pathlib.Path(p) / 'nvidia' for p in sys.path]:
    for f in (root / 'cuda_nvrtc/lib').glob('libnvrtc.so.12'):
        print(f'nvrtc={f}')
    for package in ('cuda_runtime', 'cuda_nvcc'):
        if (root / package / 'include').is_dir():
            print('cuda_include=' + str(root / package / 'include'))
";

pub struct Environment {
    pub cxx11_abi: String,
    pub torch_includes: Vec<PathBuf>,
    pub torch_libs: Vec<PathBuf>,
    pub nvrtc: Option<PathBuf>,
    pub cuda_includes: Vec<PathBuf>,
}

impl Environment {
    /// Ask `python` of an active environment, else `python3`.
    pub fn query() -> Result<Self> {
        // Not PATH: it differs between shells, and what it could change shows in torch's file below.
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let python = if std::env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
        let output = Command::new(python)
            .args(["-c", QUERY])
            .output()
            .with_context(|| format!("no `{python}` on PATH: install Python 3.10 to 3.13 and torch=={TORCH_VERSION}"))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            bail!("`import torch` failed in `{python}`: {}", log.lines().last().unwrap_or("no message"));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let all = |key: &str| -> Vec<String> {
            text.lines().filter_map(|l| l.split_once('=')).filter(|(k, _)| *k == key).map(|(_, v)| v.to_string()).collect()
        };
        let one = |key: &str| all(key).into_iter().next();
        if one("missing").is_some() {
            bail!("torch is not installed in `{python}`: pip install torch=={TORCH_VERSION}");
        }
        if let Some(file) = one("torch_file") {
            println!("cargo:rerun-if-changed={file}");
        }
        let version = one("torch").unwrap_or_default();
        if version.split('+').next() != Some(TORCH_VERSION) {
            bail!(
                "`{python}` has torch {version}, this version of volta_fa needs torch {TORCH_VERSION}: pip install torch=={TORCH_VERSION}"
            );
        }
        let paths = |key: &str| all(key).into_iter().map(PathBuf::from).collect();
        Ok(Environment {
            cxx11_abi: one("abi").unwrap_or_else(|| "1".into()),
            torch_includes: paths("torch_include"),
            torch_libs: paths("torch_lib"),
            nvrtc: one("nvrtc").map(PathBuf::from),
            cuda_includes: paths("cuda_include"),
        })
    }
}
