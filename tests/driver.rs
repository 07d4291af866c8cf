//! Tests of a machine without libcuda, the CUDA driver's library: this library loads, and a call for a GPU reports the missing driver.
//! On a machine with a driver the test returns at once.

use volta_fa::error::ErrorKind;
use volta_fa::launch::driver::{self, Driver};
use volta_fa::launch::Launcher;

#[test]
fn reports_missing_driver() {
    if driver::is_available() {
        return;
    }
    let driver = Driver { device: 0, stream: std::ptr::null_mut() };
    // the first failure must not leave a state that changes the second call's error
    for _ in 0..2 {
        let e = driver.limits().expect_err("there is no driver");
        assert_eq!(e.kind, ErrorKind::Runtime);
        assert!(e.message.contains("no CUDA driver") && e.message.contains("libcuda"), "{e}");
    }
}
