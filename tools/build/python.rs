//! Finds NVRTC and its headers in the PyPI wheels of the active Python, without importing any package.

use anyhow::{bail, Context, Result};
use std::path::PathBuf;
use std::process::Command;

const QUERY: &str = r"
import pathlib, sys
for root in [pathlib.Path(p) / 'nvidia' for p in sys.path]:
    for f in (root / 'cuda_nvrtc/lib').glob('libnvrtc.so.12'):
        print(f'nvrtc={f}')
    for package in ('cuda_runtime', 'cuda_nvcc'):
        if (root / package / 'include').is_dir():
            print('cuda_include=' + str(root / package / 'include'))
";

pub struct Environment {
    pub nvrtc: Option<PathBuf>,
    pub cuda_includes: Vec<PathBuf>,
}

impl Environment {
    /// Queries `python` of an active environment, else `python3`.
    pub fn query() -> Result<Self> {
        // not PATH, which differs between shells
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let python = if std::env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
        let output = Command::new(python)
            .args(["-c", QUERY])
            .output()
            .with_context(|| format!("no `{python}` on PATH: install Python 3.10 or newer, or set VOLTA_FA_CUDA_HOME"))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            bail!("`{python}` failed: {}", log.lines().last().unwrap_or("no message"));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let all = |key: &str| -> Vec<PathBuf> {
            text.lines().filter_map(|l| l.split_once('=')).filter(|(k, _)| *k == key).map(|(_, v)| v.into()).collect()
        };
        Ok(Environment { nvrtc: all("nvrtc").into_iter().next(), cuda_includes: all("cuda_include") })
    }
}
