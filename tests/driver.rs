//! Tests of a machine without a CUDA driver: the library loads, and a call for a GPU reports the missing driver.

use volta_fa::error::ErrorKind;
use volta_fa::launch::driver::{self, Driver};
use volta_fa::launch::Launcher;

#[test]
fn reports_missing_driver() {
    if driver::is_available() {
        return;
    }
    let driver = Driver { device: 0, stream: std::ptr::null_mut() };
    for _ in 0..2 {
        // the second call must not find an incomplete state
        let e = driver.limits().expect_err("there is no driver");
        assert_eq!(e.kind, ErrorKind::Runtime);
        assert!(e.message.contains("no CUDA driver") && e.message.contains("libcuda"), "{e}");
    }
}
