//! Ctrl-C asks for an end; the program ends where its state is whole.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Set by the first Ctrl-C. A second one ends the program at once.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Listens for Ctrl-C from now on.
    pub fn on_ctrl_c() -> Stop {
        let stop = Stop::default();
        let flag = stop.0.clone();
        let listening = ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        });
        if let Err(e) = listening {
            eprintln!("Ctrl-C will end the program at once: {e}");
        }
        stop
    }

    /// Whether an end was asked for.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
