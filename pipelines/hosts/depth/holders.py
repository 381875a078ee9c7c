"""Speech models, of transformers and the like, that call the depth decoder in them."""

HOLDERS = {  # classes whose `generate` calls that of a depth decoder, and where they have it
    "CsmForConditionalGeneration": "depth_decoder",
    "MoshiForConditionalGeneration": "depth_decoder",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "code_predictor",
    "Qwen3OmniMoeForConditionalGeneration": "talker.code_predictor",
    "Qwen3TTSTalkerForConditionalGeneration": "code_predictor",
    "Qwen3TTSForConditionalGeneration": "talker.code_predictor",
}
PACKAGES = ("transformers.", "qwen_tts.")  # where these classes are
