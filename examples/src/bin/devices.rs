//! Lists the devices of this machine that this build can run on, with the capabilities of each.
#![forbid(unsafe_code)]

use weftgrad::{Capabilities, Device, Runtime};

fn main() {
    for listed in weftgrad::devices() {
        println!("{listed}");
    }
    println!();
    let mut found = Vec::new();
    for device in [Device::Cpu, Device::Wgpu(0), Device::Cuda(0)] {
        match device.open() {
            Ok(rt) => found.push((device.to_string(), rt.capabilities().clone())),
            Err(why) => println!("{device}: {why}\n"),
        }
    }
    let columns: Vec<(&str, &Capabilities)> = found.iter().map(|(name, can)| (name.as_str(), can)).collect();
    print!("{}", Capabilities::table(&columns));
}
