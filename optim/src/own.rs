//! The gradients that an optimizer keeps for its parameters: `backward` writes them, `step` reads them.

use numcore::{Error, Result, Runtime};

use crate::FlatGradients;

/// An optimizer's own gradients, allocated when they are first needed.
///
/// They stay readable after a step, until the next backward pass overwrites them.
pub struct OwnGradients<R: Runtime> {
    buffers: Option<FlatGradients<R>>,
    /// True if a step can use the gradients.
    ready: bool,
}

impl<R: Runtime> Default for OwnGradients<R> {
    fn default() -> Self {
        OwnGradients { buffers: None, ready: false }
    }
}

impl<R: Runtime> OwnGradients<R> {
    /// The buffers, if a backward pass has allocated them.
    pub fn get(&self) -> Option<&FlatGradients<R>> {
        self.buffers.as_ref()
    }

    /// The gradient buffers, for example to clip or replace gradients; `alloc` creates them at the first call.
    pub(crate) fn get_mut(
        &mut self,
        alloc: impl FnOnce() -> Result<FlatGradients<R>>,
    ) -> Result<&mut FlatGradients<R>> {
        Ok(match &mut self.buffers {
            Some(buffers) => buffers,
            none => none.insert(alloc()?),
        })
    }

    /// Makes the next backward pass overwrite.
    pub(crate) fn zero(&mut self) {
        self.ready = false;
    }

    /// Runs `write` on buffers with the gradients accumulated since the last step; `alloc` creates them at the first
    /// call. If `write` fails, all gradients are discarded, because an interrupted backward pass has written some of
    /// them.
    pub(crate) fn accumulate(
        &mut self,
        alloc: impl FnOnce() -> Result<FlatGradients<R>>,
        write: impl FnOnce(&mut FlatGradients<R>) -> Result<()>,
    ) -> Result<()> {
        let ready = self.ready;
        let buffers = self.get_mut(alloc)?;
        if !ready {
            buffers.zero();
        }
        let done = write(buffers).inspect_err(|_| buffers.zero());
        self.ready = done.is_ok();
        done
    }

    /// Runs a step from the gradients, which are spent if it succeeds.
    pub(crate) fn spend(&mut self, step: impl FnOnce(&FlatGradients<R>) -> Result<()>) -> Result<()> {
        let buffers = self.buffers.as_ref().filter(|_| self.ready);
        let buffers = buffers
            .ok_or_else(|| Error::state("step", "there are no gradients since the last step; call `backward` first"))?;
        step(buffers)?;
        self.ready = false;
        Ok(())
    }
}
