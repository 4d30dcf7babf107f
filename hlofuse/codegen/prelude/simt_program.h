// What `hlofuse dump --stage simt` needs beside the prelude and the machine: drawn operands, and results to look at.
namespace simt {

static unsigned draw_bits() {
  static unsigned long long state = 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(state >> 33);
}

// `kind`: f and d, floats and doubles (or pairs of them); h, f16; b, bf16; i, integers from 0 to 3; p, predicates;
// z, zeros.
static Region buffer(const char* name, long long elements, int size, char kind) {
  char* data = (char*)aligned_alloc(256, (size_t)((elements * size + 511) / 256 * 256));
  memset(data, 0, (size_t)(elements * size));
  const int part = kind == 'f' ? 4 : kind == 'd' ? 8 : size;
  for (long long k = 0; kind != 'z' && k < elements * size / part; k++) {
    const float x = (float)(draw_bits() & 0xffff) / 32768.0f - 1.0f;
    const double wide = x;
    const unsigned short half = f16_bits(x), brain = (unsigned short)(bits_of(x) >> 16);
    const unsigned long long number = draw_bits() & (kind == 'p' ? 1 : 3);
    const void* from = kind == 'f'   ? (const void*)&x
                       : kind == 'd' ? (const void*)&wide
                       : kind == 'h' ? (const void*)&half
                       : kind == 'b' ? (const void*)&brain
                                     : (const void*)&number;
    memcpy(data + k * part, from, (size_t)part);
  }
  return Region{name, data, elements * size, size, false, nullptr};
}

template <int COUNT>
static int run_and_print(Entry* entry, const char* name, long long blocks, int threads, Region (&buffers)[COUNT],
                         const char* kinds, unsigned long long seed) {
  static char report[REPORT];
  const int status = hlofuse_simt_run(entry, name, nullptr, blocks, threads, buffers, COUNT, kinds, seed, 0, blocks,
                                      report, REPORT);
  printf("%s: %lld blocks of %d threads%s%s\n", name, blocks, threads, status ? ": " : "", report);
  for (int k = 0; k < COUNT && !status; k++) {
    if (kinds[k] != 'O') continue;
    printf("  %s:", buffers[k].name);
    const int element = buffers[k].element;
    for (long long byte = 0; byte < buffers[k].bytes && byte < 8 * element; byte += element) {
      if (element == 4) printf(" %.9g", *(float*)(buffers[k].base + byte));
      printf(" (0x");
      for (int n = element; n-- > 0;) printf("%02x", *(unsigned char*)(buffers[k].base + byte + n));
      printf(")");
    }
    printf("\n");
  }
  return status;
}

}  // namespace simt
