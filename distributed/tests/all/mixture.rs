//! A language model with mixtures of experts, whole or in stages.

use nn::moe::Routing;

use crate::prelude::*;

pub const WIDTH: usize = 8;
/// Tokens of a sequence.
pub const TOKENS: usize = 4;
pub const VOCAB: usize = 12;

#[derive(Module)]
#[module(crate = "::nn")]
pub struct MoeBlock<R: Runtime> {
    pub norm1: RmsNorm<R>,
    pub attention: GroupedQueryAttention<R>,
    pub norm2: RmsNorm<R>,
    pub mlp: MixtureOfExperts<R>,
}

impl MoeBlock<Cpu> {
    fn new(init: &Init<Cpu>, config: &MoeConfig) -> Result<Self> {
        let attention = GroupedQueryConfig {
            width: WIDTH,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            fused: false,
            bias: false,
            output_bias: false,
            head_norm: None,
            window: None,
            scores: Default::default(),
        };
        Ok(MoeBlock {
            norm1: RmsNorm::new(init, WIDTH)?,
            attention: GroupedQueryAttention::new(init, attention)?,
            norm2: RmsNorm::new(init, WIDTH)?,
            mlp: MixtureOfExperts::new(init, config.clone())?,
        })
    }
}

/// Blocks, and how many tokens each of their experts had since it was last looked at.
#[derive(Clone)]
pub struct Loads {
    pub blocks: Arc<Vec<MoeBlock<Cpu>>>,
    loads: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Loads {
    fn of(blocks: Vec<MoeBlock<Cpu>>) -> Self {
        let loads = Mutex::new(vec![Vec::new(); blocks.len()]);
        Loads { blocks: Arc::new(blocks), loads: Arc::new(loads) }
    }

    fn count(&self, block: usize, own: Vec<u64>) {
        let mut loads = self.loads.lock().unwrap();
        loads[block].resize(own.len(), 0);
        loads[block].iter_mut().zip(own).for_each(|(sum, load)| *sum += load);
    }

    /// Moves the balance biases, and begins to count anew.
    pub fn update(&self, rate: f64) -> Result<()> {
        for (block, loads) in self.blocks.iter().zip(self.loads.lock().unwrap().iter_mut()) {
            block.mlp.update_balance_bias(loads, rate)?;
            loads.fill(0);
        }
        Ok(())
    }
}

/// What a stage gives, and where each of its blocks routed the tokens.
pub type Routed = (Vec<Var<Cpu>>, Vec<Routing<Cpu>>);

/// A language model, or a stage of one: between stages come `[B, T, C]`, and what each router lost so far.
pub struct Mixture {
    first: usize,
    embed: Option<(Embedding<Cpu>, ContextSlot<Cpu>)>,
    pub loads: Loads,
    head: Option<(RmsNorm<Cpu>, Linear<Cpu>, ContextSlot<Cpu>)>,
    /// The factors of the balance loss and of the z-loss.
    router: [f64; 2],
}

impl Module<Cpu> for Mixture {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        visitor.enter(name);
        if let Some((wte, context)) = &self.embed {
            visitor.context(context);
            wte.visit("wte", visitor);
        }
        visitor.enter("blocks");
        self.blocks().iter().enumerate().for_each(|(k, block)| block.visit(&(self.first + k).to_string(), visitor));
        visitor.leave();
        if let Some((norm, head, context)) = &self.head {
            visitor.context(context);
            norm.visit("norm", visitor);
            head.visit("head", visitor);
        }
        visitor.leave();
    }
}

impl Mixture {
    pub fn new(init: &Init<Cpu>, config: &MoeConfig, router: [f64; 2]) -> Result<Self> {
        let wte = Embedding::new(init, VOCAB, WIDTH)?;
        let blocks = (0..2).map(|_| MoeBlock::new(init, config)).collect::<Result<_>>()?;
        let (norm, head) = (RmsNorm::new(init, WIDTH)?, Linear::new(init, WIDTH, VOCAB)?.with_cuts(Cuts::Table));
        let head = Some((norm, head, ContextSlot::cuts()));
        Ok(Mixture { first: 0, embed: Some((wte, ContextSlot::cuts())), loads: Loads::of(blocks), head, router })
    }

    pub fn plan() -> TensorPlan {
        let attention = ["q_proj", "k_proj", "v_proj"]
            .iter()
            .fold(TensorPlan::new(), |plan, projection| plan.column(format!("blocks.*.attention.{projection}")));
        attention.row("blocks.*.attention.o_proj").vocabulary("wte").experts("blocks.*.mlp.experts")
    }

    pub fn blocks(&self) -> &[MoeBlock<Cpu>] {
        &self.loads.blocks
    }

    pub fn split(self, stages: usize) -> Vec<Self> {
        let (mut embed, mut head, router) = (self.embed, self.head, self.router);
        let blocks = Arc::into_inner(self.loads.blocks).expect("a model that nobody else has");
        let (count, mut blocks) = (blocks.len(), blocks.into_iter());
        let stage = |stage: usize| {
            let (first, end) = (stage * count / stages, (stage + 1) * count / stages);
            let loads = Loads::of(blocks.by_ref().take(end - first).collect());
            let head = if stage + 1 == stages { head.take() } else { None };
            Mixture { first, embed: embed.take(), loads, head, router }
        };
        (0..stages).map(stage).collect()
    }

    /// What the stages before this one give to what it gives, and where each block here routed its tokens.
    pub fn routed(&self, inputs: &[Var<Cpu>]) -> Result<Routed> {
        let [mut x, mut lost] = [inputs[..1].to_vec(), inputs[1..].to_vec()];
        let mut x = x.remove(0);
        if let Some((wte, context)) = &self.embed {
            x = wte.forward(&context.take_tokens(&x)?)?;
        }
        let mut routings = Vec::new();
        for block in self.blocks() {
            x = block.attention.attend(block.attention.project(&block.norm1.forward(&x)?, None)?, None, &x)?;
            let out = block.mlp.forward_routed(&block.norm2.forward(&x)?)?;
            x = x.add(&out.y)?;
            if self.router != [0.0; 2] {
                let [balance, z] = self.router;
                lost.extend([out.routing.balance_loss()?.mul(balance)?, out.routing.z_loss()?.mul(z)?]);
            }
            routings.push(out.routing);
        }
        if let Some((norm, head, _)) = &self.head {
            x = head.forward(&norm.forward(&x)?)?;
        }
        lost.insert(0, x);
        Ok((lost, routings))
    }

    /// What makes the loss of the last stage's outputs.
    #[allow(clippy::type_complexity, reason = "closures of losses are of this type")]
    pub fn loss(&self) -> impl Fn(&[Var<Cpu>], &[Var<Cpu>]) -> Result<Loss<Cpu>> + Send + Sync + use<> {
        let context = self.head.as_ref().expect("the last stage").2.clone();
        move |y, t| {
            let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
            let entropy = y[0].cross_entropy_with(&context.take(&t[0], 1)?, options)?;
            let loss = y[1..].iter().try_fold(entropy, |loss, lost| loss.add(lost))?;
            Loss::sum(context.of_whole(&loss)?, t[0].dims().iter().product::<usize>() as f64)
        }
    }
}

impl Stage<Cpu> for Mixture {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let (outputs, routings) = self.routed(inputs)?;
        if is_grad_enabled() {
            for (k, routing) in routings.iter().enumerate() {
                self.loads.count(k, routing.loads()?);
            }
        }
        Ok(outputs)
    }
}
