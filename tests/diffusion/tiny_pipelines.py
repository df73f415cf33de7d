# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines of many of diffusers' classes, built of shared parts with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLTemporalDecoder,
    AutoencoderKLWan,
    BriaTransformer2DModel,
    CogVideoXDDIMScheduler,
    CogVideoXTransformer3DModel,
    ControlNetModel,
    Cosmos3OmniTransformer,
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    JoyImageEditPlusTransformer3DModel,
    Kandinsky3UNet,
    LatteTransformer3DModel,
    LCMScheduler,
    MotionAdapter,
    OmniGenTransformer2DModel,
    PixArtTransformer2DModel,
    PriorTransformer,
    PRXTransformer2DModel,
    T2IAdapter,
    UnCLIPScheduler,
    UNet2DConditionModel,
    UNetSpatioTemporalConditionModel,
    UniPCMultistepScheduler,
    VQModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Qwen2VLImageProcessor,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vllm_omni.testing.tiny import flux, wan, wan_i2v
from vllm_omni.testing.tiny.qwen_image import VISION_TOKENS, add_template_tokens
from vllm_omni.testing.tiny.text_encoders import (
    clip_config,
    make_clip_tokenizer,
    make_qwen_tokenizer,
    make_t5,
    make_t5_tokenizer,
    qwen3_config,
)
from vllm_omni.testing.tiny.tokenizer import padded_vocab_size, token_ids
from vllm_omni.testing.tiny.weights import fill_random

TEXT = 32
CHANNELS = (8, 16)
_NOISE: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_NO_CHECKER: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


def build(name: str, tiny_diffusion: Callable[[str], Path] | None = None) -> DiffusionPipeline:
    """A pipeline of this class. Its networks depend on all of their inputs, and its output is not flat.

    Args:
        name: The class; `Multi` before it: with two ControlNets.
        tiny_diffusion: The fixture, for classes with the networks of a checkpoint that ships.
    """
    if name in _SHARED:
        assert tiny_diffusion is not None
        return _like_a_shared_one(name, tiny_diffusion)
    name, is_multi = name.removeprefix("Multi"), name.startswith("Multi")
    make = next(make for prefix, make in _FAMILIES.items() if name.startswith(prefix))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments = make(name)
        if is_multi:
            nets = [arguments["controlnet"], ControlNetModel.from_config(arguments["controlnet"].config)]
            arguments["controlnet"] = MultiControlNetModel(nets)
        pipe = getattr(diffusers, name)(**arguments)
    for index, module in enumerate(pipe.components.values()):
        if isinstance(module, torch.nn.Module):
            fill_random(module.eval(), index, 0.7 if "Kandinsky" in name else 1.0)  # it doubles rounding errors else
    return pipe


def _vae() -> AutoencoderKL:
    """8 pixels a latent on each side."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
    )


def _ddim() -> DDIMScheduler:
    return DDIMScheduler(**_NOISE, clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def _unet(**settings: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "block_out_channels": CHANNELS,
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": TEXT,
            "attention_head_dim": 2,
            **settings,
        }
    )


def _adapter() -> T2IAdapter:
    return T2IAdapter(channels=list(CHANNELS), num_res_blocks=1, downscale_factor=8, adapter_type="full_adapter")


def _for_adapter(name: str) -> dict[str, Any]:
    """An adapter's features have the size that each block of the UNet has before it scales down."""
    if "Adapter" not in name:
        return {}
    return {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }


def _unet_channels(name: str) -> int:
    """The UNet reads latents; those of an image to edit; or a masked image's, and the mask."""
    if "Inpaint" in name and "ControlNet" not in name:
        return 9
    return 8 if "Pix2Pix" in name or "StableVideo" in name else 4


def _controlled(name: str, unet: UNet2DConditionModel) -> dict[str, Any]:
    if "ControlNet" in name:
        net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 4, 8, 8))
        return {"controlnet": net}
    return {"adapter": _adapter()} if "Adapter" in name else {}


def _stable_diffusion(name: str) -> dict[str, Any]:
    tokenizer = make_clip_tokenizer()
    unet = _unet(in_channels=_unet_channels(name), **_for_adapter(name))
    if "LatentConsistency" in name:
        unet = _unet(time_cond_proj_dim=8)
    return {
        "vae": _vae(),
        "text_encoder": CLIPTextModel(clip_config(tokenizer, TEXT, 2)),
        "tokenizer": tokenizer,
        "unet": unet,
        "scheduler": LCMScheduler(**_NOISE) if "LatentConsistency" in name else _ddim(),
        **_NO_CHECKER,
        **_controlled(name, unet),
    }


def _stable_diffusion_xl(name: str) -> dict[str, Any]:
    tokenizer = make_clip_tokenizer()
    unet = _unet(
        in_channels=_unet_channels(name),
        cross_attention_dim=2 * TEXT,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=TEXT + 6 * 8,
        use_linear_projection=True,
        **_for_adapter(name),
    )
    return {
        "vae": _vae(),
        "text_encoder": CLIPTextModel(clip_config(tokenizer, TEXT, 3)),
        "text_encoder_2": CLIPTextModelWithProjection(clip_config(tokenizer, TEXT, 3)),
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "unet": unet,
        "scheduler": _ddim(),
        **_controlled(name, unet),
    }


def _animate_diff(name: str) -> dict[str, Any]:
    tokenizer, unet = make_clip_tokenizer(), _unet()
    return {
        "vae": _vae(),
        "text_encoder": CLIPTextModel(clip_config(tokenizer, TEXT, 2)),
        "tokenizer": tokenizer,
        "unet": unet,
        "scheduler": _ddim(),
        **_controlled(name, unet),
        "motion_adapter": MotionAdapter(
            block_out_channels=CHANNELS,
            motion_layers_per_block=1,
            motion_norm_num_groups=4,
            motion_num_attention_heads=2,
        ),
    }


def _vision(size: int = 32) -> CLIPVisionModelWithProjection:
    return CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=TEXT,
            projection_dim=TEXT,
            intermediate_size=TEXT,
            num_attention_heads=2,
            num_hidden_layers=2,
            image_size=size,
            patch_size=8,
        )
    )


def _stable_video(name: str) -> dict[str, Any]:
    unet = UNetSpatioTemporalConditionModel(
        sample_size=8,
        in_channels=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=TEXT,
        num_attention_heads=8,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=3 * 8,
        layers_per_block=1,
        num_frames=2,
    )
    return {
        "vae": AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4
        ),
        "image_encoder": _vision(224),
        "unet": unet,
        "scheduler": EulerDiscreteScheduler(
            **_NOISE,
            interpolation_type="linear",
            prediction_type="v_prediction",
            timestep_type="continuous",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
        ),
        "feature_extractor": CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32),
    }


def _marigold(name: str) -> dict[str, Any]:
    tokenizer, is_depth = make_clip_tokenizer(), "Depth" in name
    albedo = {"prediction_space": "srgb", "up_to_scale": False}
    roughness = {"prediction_space": "linear", "up_to_scale": False}
    properties = {"target_names": ["albedo", "roughness"], "albedo": albedo, "roughness": roughness}
    depth = {"prediction_type": "depth", "scale_invariant": True, "shift_invariant": True}
    return {
        "vae": _vae(),
        "text_encoder": CLIPTextModel(clip_config(tokenizer, TEXT, 2)),
        "tokenizer": tokenizer,
        "unet": _unet(in_channels=8 if is_depth else 12, out_channels=4 if is_depth else 8),
        "scheduler": DDIMScheduler(**_NOISE, prediction_type="v_prediction", clip_sample=False),
        **(depth if is_depth else {"prediction_type": "intrinsics", "target_properties": properties}),
    }


def _image_variation(name: str) -> dict[str, Any]:
    return {
        "vae": _vae(),
        "image_encoder": _vision(),
        "unet": _unet(),
        "scheduler": _ddim(),
        "safety_checker": None,
        "feature_extractor": CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32),
        "requires_safety_checker": False,
    }


def _cogvideox(name: str) -> dict[str, Any]:
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=TEXT,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    scheduler = CogVideoXDDIMScheduler(**_NOISE, prediction_type="v_prediction")
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler, **_t5()}


# Classes with networks of the tiny checkpoints that ship -> what is loaded with that class, or set.
_SHARED: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "StableDiffusion3InpaintPipeline": ("stable_diffusion_3", dict),
    "FluxInpaintPipeline": ("flux", dict),
    "FluxFillPipeline": ("flux", lambda: {"transformer": _flux(4 * (2 * 16 + 64))}),
    "FluxControlPipeline": ("flux", lambda: {"transformer": _flux(4 * 2 * 16)}),
    "FluxControlImg2ImgPipeline": ("flux", lambda: {"transformer": _flux(4 * 2 * 16)}),
    "FluxControlInpaintPipeline": ("flux", lambda: {"transformer": _flux(4 * 2 * 16)}),
    "Flux2KleinInpaintPipeline": ("flux2_klein", dict),
    "LucyEditPipeline": ("wan", lambda: {"transformer": WanTransformer3DModel(**_WAN, in_channels=2 * 16)}),
    "QwenImageInpaintPipeline": ("qwen_image", dict),
    "ZImageInpaintPipeline": ("z_image", dict),
    "WanVideoToVideoPipeline": ("wan", dict),
    "WanImageToVideoPipeline": ("wan_i2v", lambda: {"transformer": _wan_first_and_last()}),
    "WanVACEPipeline": ("wan", lambda: {"transformer": _wan_vace()}),
    "LTX2ConditionPipeline": ("ltx2", dict),
    "VisualClozePipeline": ("flux", lambda: {"transformer": _flux(4 * (2 * 16 + 64)), "resolution": 64}),
}


def _like_a_shared_one(name: str, tiny_diffusion: Callable[[str], Path]) -> DiffusionPipeline:
    """A pipeline of the components of a checkpoint that ships; those with other inputs are new, with its last layer."""
    checkpoint, make = _SHARED[name]
    pipe = DiffusionPipeline.from_pretrained(tiny_diffusion(checkpoint))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = make()
    for index, (part, module) in enumerate(made.items()):
        if isinstance(module, torch.nn.Module):
            fill_random(module.eval(), index, 1.0)
            module.proj_out.load_state_dict(pipe.components[part].proj_out.state_dict())
    pipeline_class = getattr(diffusers, name)
    components, options = pipeline_class._get_signature_keys(pipeline_class)
    parts = {**pipe.components, **made}
    known = {part: module for part, module in parts.items() if part in components or part in options}
    settings = {option: pipe.config[option] for option in options if option in pipe.config and option not in parts}
    return pipeline_class(**known, **settings)


def _flux(in_channels: int) -> FluxTransformer2DModel:
    size = flux.SIZES["default"]
    return FluxTransformer2DModel(
        in_channels=in_channels,
        out_channels=4 * 16,
        num_layers=size.layers,
        num_single_layers=size.layers,
        attention_head_dim=sum(size.axes),
        num_attention_heads=size.heads,
        joint_attention_dim=size.text_hidden,
        pooled_projection_dim=size.text_hidden,
        guidance_embeds=True,
        axes_dims_rope=size.axes,
    )


_WAN: dict[str, Any] = {
    "num_attention_heads": wan.HEADS,
    "attention_head_dim": wan.HEAD_DIM,
    "out_channels": 16,
    "text_dim": wan.TEXT_HIDDEN,
    "ffn_dim": 2 * wan.HEADS * wan.HEAD_DIM,
    "num_layers": 2,
}


def _wan_first_and_last() -> WanTransformer3DModel:
    tokens = (wan_i2v.VISION_PIXELS // 8) ** 2 + 1
    return WanTransformer3DModel(
        **_WAN,
        in_channels=2 * 16 + wan_i2v.MASK_CHANNELS,
        image_dim=wan_i2v.VISION_HIDDEN,
        added_kv_proj_dim=wan.HEADS * wan.HEAD_DIM,
        pos_embed_seq_len=2 * tokens,
    )


def _wan_vace() -> WanVACETransformer3DModel:
    return WanVACETransformer3DModel(**_WAN, in_channels=16, vace_layers=[0], vace_in_channels=2 * 16 + 64)


def _t5(hidden: int = TEXT) -> dict[str, Any]:
    tokenizer = make_t5_tokenizer()
    return {"tokenizer": tokenizer, "text_encoder": make_t5(tokenizer, hidden, 2)}


def _pixart(name: str) -> dict[str, Any]:
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        cross_attention_dim=24,
        caption_channels=TEXT,
        use_additional_conditions=False,
    )
    return {"transformer": transformer, "vae": _vae(), "scheduler": _ddim(), **_t5()}


def _latte(name: str) -> dict[str, Any]:
    transformer = LatteTransformer3DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=TEXT,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=2,
    )
    return {"transformer": transformer, "vae": _vae(), "scheduler": _ddim(), **_t5()}


def _omnigen(name: str) -> dict[str, Any]:
    tokenizer = make_qwen_tokenizer()
    transformer = OmniGenTransformer2DModel(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        num_layers=2,
        in_channels=4,
        time_step_dim=8,
        vocab_size=padded_vocab_size(tokenizer),
        pad_token_id=2,
        rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
    )
    return {
        "transformer": transformer,
        "vae": _vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1),
        "tokenizer": tokenizer,
    }


def _movq() -> VQModel:
    return VQModel(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


# The blocks of Kandinsky 2 and of DeepFloyd IF.
_SIMPLE_ATTENTION: dict[str, Any] = {
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "attention_head_dim": 4,
    "resnet_time_scale_shift": "scale_shift",
    "encoder_hid_dim": TEXT,
}


def _kandinsky_2_2(name: str) -> dict[str, Any]:
    tokenizer = make_clip_tokenizer()
    return {
        "unet": _unet(
            out_channels=8, addition_embed_type="image", encoder_hid_dim_type="image_proj", **_SIMPLE_ATTENTION
        ),
        "scheduler": _ddim(),
        "movq": _movq(),
        "prior_prior": PriorTransformer(num_attention_heads=2, attention_head_dim=12, embedding_dim=TEXT, num_layers=1),
        "prior_image_encoder": _vision(),
        "prior_text_encoder": CLIPTextModelWithProjection(clip_config(tokenizer, TEXT, 2)),
        "prior_tokenizer": tokenizer,
        "prior_scheduler": UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=10.0
        ),
        "prior_image_processor": CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32),
    }


def _kandinsky_3(name: str) -> dict[str, Any]:
    unet = Kandinsky3UNet(
        in_channels=4,
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(32, 64),
        cross_attention_dim=4,
        encoder_hid_dim=TEXT,
    )
    return {"unet": unet, "scheduler": DDPMScheduler(**_NOISE), "movq": _movq(), **_t5()}


def _deep_floyd(name: str) -> dict[str, Any]:
    unet = _unet(
        sample_size=32,
        in_channels=3,
        out_channels=6,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        act_fn="gelu",
        **{**_SIMPLE_ATTENTION, "cross_attention_dim": TEXT},
    )
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", variance_type="learned_range", thresholding=True)
    return {"unet": unet, "scheduler": scheduler, **_t5(), **_NO_CHECKER, "watermarker": None}


def _prx_pixel(name: str) -> dict[str, Any]:
    tokenizer = make_qwen_tokenizer()
    transformer = PRXTransformer2DModel(
        in_channels=3,
        patch_size=8,
        context_in_dim=TEXT,
        hidden_size=32,
        num_heads=4,
        depth=2,
        axes_dim=[4, 4],
        bottleneck_size=16,
        resolution_embeds=True,
    )
    return {
        "transformer": transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "text_encoder": Qwen3Model(qwen3_config(tokenizer, TEXT, 2)),
        "tokenizer": tokenizer,
        "default_sample_size": None,
        "prompt_max_tokens": 48,
    }


def _bria(name: str) -> dict[str, Any]:
    transformer = BriaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        pooled_projection_dim=None,
        axes_dims_rope=[0, 4, 12],
    )
    return {"transformer": transformer, "vae": _vae(), "scheduler": FlowMatchEulerDiscreteScheduler(), **_t5()}


def _cosmos_3(name: str) -> dict[str, Any]:
    tokenizer = make_qwen_tokenizer()
    add_template_tokens(tokenizer, "".join(VISION_TOKENS.values()))
    transformer = Cosmos3OmniTransformer(
        head_dim=6,
        hidden_act="silu",
        hidden_size=12,
        intermediate_size=24,
        latent_channel=16,
        latent_patch_size=1,
        num_attention_heads=2,
        num_hidden_layers=1,
        num_key_value_heads=1,
        patch_latent_dim=16,
        qk_norm_for_text=False,
        rms_norm_eps=1e-5,
        rope_axes_dim=[1, 1, 1],
        vocab_size=1024,
    )
    return {
        "transformer": transformer,
        "text_tokenizer": tokenizer,
        "vae": AutoencoderKLWan(base_dim=4, num_res_blocks=1),
        "scheduler": UniPCMultistepScheduler(),
        "sound_tokenizer": None,
        "safety_checker": None,
        "enable_safety_checker": False,
    }


def _joyimage(name: str) -> dict[str, Any]:
    tokenizer = make_qwen_tokenizer()
    add_template_tokens(tokenizer, "".join(VISION_TOKENS.values()))
    text = {
        "hidden_size": TEXT,
        "intermediate_size": 2 * TEXT,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": padded_vocab_size(tokenizer),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
        "max_position_embeddings": 4096,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": TEXT,
        "patch_size": 14,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        **token_ids(tokenizer, VISION_TOKENS),
    )
    pixels = {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2}
    settings = {"size": pixels, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images, videos = Qwen2VLImageProcessor(**settings), Qwen3VLVideoProcessor(**settings)
    transformer = JoyImageEditPlusTransformer3DModel(
        patch_size=[1, 2, 2],
        in_channels=16,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=TEXT,
        num_layers=1,
        rope_dim_list=[4, 6, 6],
        theta=256,
    )
    return {
        "transformer": transformer,
        "vae": AutoencoderKLWan(base_dim=4, num_res_blocks=1),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "tokenizer": tokenizer,
        "text_encoder": Qwen3VLForConditionalGeneration(config),
        "processor": Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template),
    }


_FAMILIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "StableDiffusionImageVariation": _image_variation,
    "StableDiffusionXL": _stable_diffusion_xl,
    "StableDiffusion": _stable_diffusion,
    "LatentConsistency": _stable_diffusion,
    "AnimateDiff": _animate_diff,
    "CogVideoX": _cogvideox,
    "StableVideo": _stable_video,
    "Marigold": _marigold,
    "PixArt": _pixart,
    "Latte": _latte,
    "OmniGen": _omnigen,
    "KandinskyV22": _kandinsky_2_2,
    "Kandinsky3": _kandinsky_3,
    "IF": _deep_floyd,
    "PRXPixel": _prx_pixel,
    "Bria": _bria,
    "Cosmos3Omni": _cosmos_3,
    "JoyImageEditPlus": _joyimage,
}
"""The beginning of a class's name -> a function of the name that makes the arguments of its constructor."""
