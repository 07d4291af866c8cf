//! Tests `$VOLTA_SIM_LISTINGS`, a folder that keeps nvdisasm's output for later runs. Needs nvdisasm (`$VOLTA_SIM_NVDISASM` or `PATH`).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Writes a script that runs nvdisasm and counts its calls in a file beside it. Returns the script's path.
fn counting(folder: &Path) -> PathBuf {
    let real = std::env::var_os("VOLTA_SIM_NVDISASM").map_or_else(|| "nvdisasm".into(), |path| path.to_string_lossy().into_owned());
    let path = folder.join("nvdisasm");
    fs::write(&path, format!("#!/bin/sh\necho call >> \"$0.calls\"\nexec '{real}' \"$@\"\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_kept_listing_replaces_nvdisasm() {
    let folder = std::env::temp_dir().join(format!("volta-sim-listings-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let nvdisasm = counting(&folder);
    let calls = || fs::read_to_string(folder.join("nvdisasm.calls")).map_or(0, |text| text.lines().count());
    let list = |kernel: &str, keep: bool| {
        let cubin = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(kernel);
        let mut command = Command::new(env!("CARGO_BIN_EXE_volta-sim"));
        command.arg("--list").arg(cubin).env("VOLTA_SIM_NVDISASM", &nvdisasm);
        command.env("VOLTA_SIM_LISTINGS", if keep { folder.join("listings") } else { PathBuf::new() });
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let first = list("saxpy.cubin", true);
    assert_eq!(calls(), 1);
    assert_eq!(list("saxpy.cubin", true), first);
    assert_eq!(calls(), 1, "the second run takes the kept listing");
    list("functional_sm70.cubin", true);
    assert_eq!(calls(), 2, "another cubin has its own listing");
    list("saxpy.cubin", false);
    assert_eq!(calls(), 3, "without a folder nothing is kept");
    let kept: Vec<_> = fs::read_dir(folder.join("listings")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(kept.len() == 2 && kept.iter().all(|path| path.extension().is_some_and(|e| e == "sass")), "{kept:?}");
    fs::remove_dir_all(&folder).unwrap();
}
